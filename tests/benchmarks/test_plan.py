"""From a spec to runs: what is shared, what a key depends on, and what it does not."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.methods import METHODS
from vicinal.benchmarks.plan import Plan, key_of, plan
from vicinal.benchmarks.spec import Row, Setting, Spec, load_spec
from vicinal.data.augmix import AugMix
from vicinal.errors import UnknownNameError

DIGITS = Setting("Digits", "digits")
ERM, SOFT = Row("ERM", "erm"), Row("Soft", "soft")


def spec(settings: Setting | tuple[Setting, ...] = DIGITS, *rows: Row, **options: Any) -> Spec:
    settings = settings if isinstance(settings, tuple) else (settings,)
    return Spec("made", "Made", settings=settings, rows=rows or (ERM, SOFT), **{"seeds": 1, **options})


def algorithms(made: Plan) -> list[str]:
    return [run.algorithm for run in made.trainings]


def test_a_run_for_every_seed_group_and_row_from_shared_models() -> None:
    groups = Setting("Digits", "digits", targets=(("0", "90"), ("15",)))
    made = plan(spec(groups, seeds=2))
    assert [(run.seed, run.request.targets) for run in made.trainings] == [
        (0, ("0", "90")),
        (0, ("15",)),
        (1, ("0", "90")),
        (1, ("15",)),
    ]
    assert [(run.seed, run.targets, run.row) for run in made.measures] == [
        (seed, targets, row)
        for seed in (0, 1)
        for targets in (("0", "90"), ("15",))
        for row in ("ERM", "Soft")
    ]
    by_key = {run.key: run for run in made.trainings}
    assert len(by_key) == 4
    assert all(by_key[run.model].seed == run.seed for run in made.measures)
    assert all(by_key[run.model].request.targets == run.targets for run in made.measures)
    assert len({run.key for run in made.measures}) == len(made.measures)


def test_each_leaves_every_domain_out_once_and_no_targets_are_the_data_sets_own() -> None:
    made = plan(spec(Setting("PACS", "pacs", targets=(("each",),))))
    assert [run.request.targets for run in made.trainings] == [
        ("art_painting",),
        ("cartoon",),
        ("photo",),
        ("sketch",),
    ]
    assert plan(spec()).trainings[0].request.targets == ("0", "90")


def test_a_key_is_a_digest_of_the_whole_description() -> None:
    (run,) = plan(spec(DIGITS, ERM)).measures
    text = json.dumps(run.about, sort_keys=True, separators=(",", ":"))
    assert run.key == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert json.loads(text)["training"]["training"]["iterations"] == 200  # defaults count too
    assert key_of({"b": 1, "a": 2}) == key_of({"a": 2, "b": 1})


TRAINING = [
    {"data": "rotated_fashion"},
    {"targets": (("0",),)},
    {"sources": ("15", "30", "45")},
    {"backbone": "small_gn"},
    {"weights": "some/file.safetensors"},
    {"size": 12},
    {"training": {"iterations": 3}},
    {"training": {"phi_layers": 2}},
    {"out_of_fold": {"epochs": 3}},
    {"out_of_fold": None},
]
MEASURING = [{"batch_size": 3}, {"stream": "class_sorted"}, {"stream": "label_shift"}]


@pytest.mark.parametrize("change", [*TRAINING, *MEASURING], ids=str)
def test_a_key_depends_on_whatever_the_result_does(change: dict[str, Any]) -> None:
    before, after = (plan(spec(setting, SOFT)) for setting in (DIGITS, replace(DIGITS, **change)))
    assert before.measures[0].key != after.measures[0].key
    assert (before.trainings[0].key != after.trainings[0].key) == (change in TRAINING)


def test_a_key_depends_on_method_options_alpha_and_seed_too() -> None:
    rows = [SOFT, replace(SOFT, method="hard"), replace(SOFT, options={"lr": 1e-4})]
    rows += [replace(SOFT, options={"statistics": "stream"}), replace(SOFT, algorithm="meta")]
    shifted = [replace(DIGITS, stream="label_shift", alpha=alpha) for alpha in (0.1, 0.2)]
    keys = [run.key for row in rows for run in plan(spec(DIGITS, row), seeds=2).measures]
    keys += [run.key for setting in shifted for run in plan(spec(setting, SOFT)).measures]
    assert len(set(keys)) == len(keys) == 2 * len(rows) + 2
    # The default step size, given, is not the default step size, to be chosen.
    assert METHODS["soft"].defaults.lr == 1e-4


def test_names_headings_and_how_often_it_saves_have_no_part_in_a_key() -> None:
    other = replace(DIGITS, name="Other", training={"save_every": 3}, alpha=0.9, metric="ece")
    one, same = plan(spec(DIGITS, SOFT)), plan(replace(spec(other, replace(SOFT, label="x")), name="y"))
    assert [run.key for run in one.measures] == [run.key for run in same.measures]
    where = replace(DIGITS, weights="here/w.safetensors"), replace(DIGITS, weights="there/w.safetensors")
    assert len({plan(spec(setting, SOFT)).trainings[0].key for setting in where}) == 1


def test_erm_rows_are_served_by_the_neighbor_training_where_one_is_needed() -> None:
    neighbor = Row("Neighbor", "neighbor", "neighbor")
    assert algorithms(plan(spec(DIGITS, ERM, SOFT))) == ["erm"]
    assert algorithms(plan(spec(DIGITS, ERM, SOFT, neighbor))) == ["neighbor"]
    meta = Row("Paper", "vnl_paper", "meta")
    assert algorithms(plan(spec(DIGITS, ERM, neighbor, meta))) == ["neighbor", "meta"]
    # Which rows are asked for now has no part in it: later ones would need other models.
    assert algorithms(plan(spec(DIGITS, ERM, neighbor), only=("ERM",))) == ["neighbor"]


def test_left_out_models_only_where_a_row_needs_them() -> None:
    def folds(*rows: Row) -> dict[str, Any] | None:
        return plan(spec(DIGITS, *rows)).trainings[0].request.out_of_fold

    assert folds(ERM, Row("BN", "bn"), Row("Soft", "soft", options={"lr": 1e-3})) is None
    for_steps = folds(ERM, SOFT)
    assert for_steps is not None
    assert for_steps["updates"] == ("none",)  # nobody uses the rule: none is tried
    fitted = folds(ERM, Row("VNL", "vnl"))
    assert fitted is not None
    assert "updates" not in fitted
    assert fitted["baselines"] == ()
    alone = plan(spec(replace(DIGITS, out_of_fold=None), SOFT))
    assert alone.trainings[0].request.out_of_fold is None
    assert not alone.measures[0].chooses


def test_one_choice_serves_all_seeds() -> None:
    rows = ERM, SOFT, Row("VNL", "vnl"), Row("Given", "soft", options={"lr": 1e-3})
    each, one = (plan(spec(DIGITS, *rows, seeds=3, one_choice=flag)) for flag in (False, True))
    assert all(run.chooser is None for run in each.measures)
    first, *others = one.trainings
    assert first == each.trainings[0]
    assert first.request.out_of_fold is not None
    assert [(run.seed, run.request.out_of_fold) for run in others] == [(1, None), (2, None)]
    borrowing = {(run.seed, run.row) for run in one.measures if run.chooser is not None}
    assert borrowing == {(seed, row) for seed in (1, 2) for row in ("Soft", "VNL")}
    assert {run.chooser for run in one.measures} == {None, first.key}
    soft = [run for run in one.measures if run.row == "Soft"]
    assert len({tuple(run.about["step_sizes"]) for run in soft}) == 1
    assert [run.about.get("chooser") for run in soft] == [None, first.about, first.about]
    # Seed 0 is what it would be without, and the others are runs of their own.
    same = {run.key for run in each.measures} & {run.key for run in one.measures}
    assert same == {run.key for run in one.measures if run.seed == 0}


def test_nobody_borrows_where_there_are_no_left_out_models() -> None:
    alone = replace(DIGITS, out_of_fold=None)
    made = plan(spec(alone, ERM, SOFT, Row("VNL", "vnl"), seeds=2, one_choice=True))
    assert [run.chooser for run in made.measures] == [None] * 6
    assert [run.key for run in made.measures] == [
        run.key for run in plan(spec(alone, ERM, SOFT, Row("VNL", "vnl"), seeds=2)).measures
    ]


def test_who_chooses_is_trained_where_only_its_choice_is_wanted() -> None:
    whole = plan(spec(DIGITS, ERM, SOFT, seeds=2, one_choice=True))
    done = {(run.key, target) for run in whole.measures if run.seed == 0 for target in run.results}
    left = plan(spec(DIGITS, ERM, SOFT, seeds=2, one_choice=True), done=done)
    assert [run.seed for run in left.trainings] == [1, 0]
    only_erm = plan(spec(DIGITS, ERM, SOFT, seeds=2, one_choice=True), only=("ERM",), done=done)
    assert [run.seed for run in only_erm.trainings] == [1]


def test_who_chooses_a_step_size() -> None:
    given = Row("Given", "soft", options={"lr": 1e-3})
    made = plan(spec(DIGITS, ERM, SOFT, given, Row("VNL", "vnl"), Row("T3A", "t3a"), Row("MEMO", "memo")))
    assert [run.row for run in made.measures if run.chooses] == ["Soft"]


def test_columns_that_differ_in_the_stream_alone_share_their_models() -> None:
    mixed = replace(DIGITS, name="Mixed", stream="mixed", batch_size=50)
    only_erm = replace(ERM, settings=("Mixed",)), replace(SOFT, settings=("Digits",))
    made = plan(spec((DIGITS, mixed), *only_erm))
    assert len(made.trainings) == 1
    assert [run.results for run in made.measures] == [("0", "90"), ("0+90",)]
    other = replace(mixed, training={"iterations": 3})
    assert len(plan(spec((DIGITS, other), *only_erm)).trainings) == 2


def test_columns_with_the_same_named_sources_share_their_models() -> None:
    near, far = (
        Setting(name, "digits", targets=((name,),), sources=("0", "15", "30")) for name in ("45", "90")
    )
    made = plan(spec((near, far), SOFT))
    assert [run.request.targets for run in made.trainings] == [
        ("45", "60", "75", "90")
    ]  # all that it never saw
    assert [run.targets for run in made.measures] == [("45",), ("90",)]
    assert len({run.key for run in made.measures}) == 2


def test_equal_cells_are_one_run() -> None:
    made = plan(spec((DIGITS, replace(DIGITS, name="Again", metric="seconds")), SOFT))
    assert [run.setting for run in made.measures] == ["Digits", "Again"]
    assert len({run.key for run in made.measures}) == 1


def test_only_names_columns_data_sets_rows_methods_and_trainings() -> None:
    whole = spec(
        (DIGITS, Setting("MNIST", "rotated_mnist"), Setting("Small MNIST", "rotated_mnist", size=14))
    )

    def cells(*only: str) -> list[tuple[str, str]]:
        return [(run.setting, run.row) for run in plan(whole, only=only).measures]

    assert cells("Digits") == [("Digits", "ERM"), ("Digits", "Soft")]
    assert cells("rotated_mnist", "ERM") == [("MNIST", "ERM"), ("Small MNIST", "ERM")]
    assert cells("Soft", "digits") == [("Digits", "Soft")]
    assert cells("soft", "digits") == [("Digits", "Soft")]
    assert len(cells()) == len(cells("Soft", "erm")) == 6
    with pytest.raises(UnknownNameError, match=r"row, source training or method 'Hard': choose from .*Soft"):
        cells("Hard")
    meta = spec(DIGITS, ERM, replace(ERM, label="Meta", algorithm="meta"), Row("Cited"))
    assert [run.row for run in plan(meta, only=("meta",)).measures] == ["Meta"]
    assert [run.row for run in plan(meta, only=("erm",)).measures] == [
        "ERM"
    ]  # not its method on another model
    named = spec(DIGITS, replace(SOFT, label="soft"), SOFT)
    assert [run.row for run in plan(named, only=("soft",)).measures] == ["soft"]  # a label before a method


def test_seeds_and_what_is_done() -> None:
    assert {run.seed for run in plan(spec(seeds=3)).measures} == {0, 1, 2}
    assert {run.seed for run in plan(spec(seeds=3), seeds=2).measures} == {0, 1}
    made = plan(spec())
    half = {(made.measures[0].key, "0"), (made.measures[0].key, "90"), (made.measures[1].key, "0")}
    left = plan(spec(), done=half)
    assert left.measures == made.measures[1:]
    assert left.trainings == made.trainings
    done = half | {(made.measures[1].key, "90")}
    assert plan(spec(), done=done) == Plan((), ())


def test_quick_is_what_the_spec_says_or_hardly_anything() -> None:
    (run,) = plan(spec(replace(DIGITS, training={"iterations": 500, "batch_size": 9})), quick=True).trainings
    assert run.request.training["iterations"] == 8
    assert run.request.training["batch_size"] == 9
    said = {
        "training": {"iterations": 3},
        "batch_size": 50,
        "backbone": "small_gn",
        "targets": (("15",),),
        "out_of_fold": {"epochs": 7},
    }
    own = replace(DIGITS, quick=said, training={"batch_size": 9}, out_of_fold={"stream_images": 60})
    made = plan(spec(own, SOFT, seeds=5), quick=True)
    (trained,), (measured,) = made.trainings, made.measures
    assert trained.request.training["iterations"] == 3
    assert trained.request.training["batch_size"] == 9
    assert trained.request.backbone == "small_gn"
    assert trained.request.out_of_fold is not None
    assert (trained.request.out_of_fold["epochs"], trained.request.out_of_fold["stream_images"]) == (7, 60)
    assert measured.stream.batch_size == 50
    assert measured.targets == ("15",)
    assert measured.quick
    slow = plan(spec(own, SOFT)).measures[0]
    assert not slow.quick
    assert slow.key != measured.key
    assert len(plan(spec(own, SOFT, seeds=5), quick=True, seeds=2).measures) == 2


def test_trainings_can_be_made_longer_or_shorter() -> None:
    told = replace(DIGITS, training={"iterations": 500, "batch_size": 9})
    (run,) = plan(spec(told, ERM), iterations=70).trainings
    assert run.request.training == {"iterations": 70, "batch_size": 9, "algorithm": "erm"}
    assert run.key != plan(spec(told, ERM)).trainings[0].key
    assert plan(spec(told, ERM), iterations=500) == plan(spec(told, ERM))


def test_another_backbone_takes_its_own_weights() -> None:
    with_file = replace(DIGITS, backbone="resnet18", weights="some/resnet18.pth")
    (run,) = plan(spec(with_file, ERM), backbone="small_ln").trainings
    assert (run.request.backbone, run.about["weights"]) == ("small_ln", "none")
    scratch = replace(DIGITS, backbone="resnet18", weights="none")
    (run,) = plan(spec(scratch, ERM), backbone="resnet34").trainings
    assert (run.request.backbone, run.about["weights"]) == ("resnet34", "none")
    (run,) = plan(spec(scratch, ERM), weights="mine.pth").trainings
    assert run.request.weights == "mine.pth"


def test_options_arrive_as_methods_take_them() -> None:
    (run,) = plan(spec(DIGITS, Row("Soft", "soft", options={"augment": "augmix"}))).measures
    assert run.entry.options == {"augment": AugMix()}


def test_plans_are_the_same_every_time() -> None:
    assert plan(load_spec("comparison")) == plan(load_spec("comparison"))


def test_normalization_is_the_weights_own_and_goes_with_them() -> None:
    plain = replace(DIGITS, backbone="efficientnet_lite0", weights="some/lite0.pth")
    own = replace(plain, mean=(0.498,), std=(0.502,))
    (one,), (other,) = (plan(spec(setting, ERM)).trainings for setting in (plain, own))
    assert (other.request.mean, other.request.std) == ((0.498,), (0.502,))
    assert one.key != other.key
    (run,) = plan(spec(own, ERM), backbone="small").trainings
    assert run.request.mean is run.request.std is None
    both = plan(spec((plain, replace(own, name="Other")), ERM))
    assert {run.key for run in both.trainings} == {one.key, other.key}
