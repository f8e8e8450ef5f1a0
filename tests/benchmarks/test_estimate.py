"""What a plan will cost: sizes against nets that were really built, counts against the plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.benchmarks.estimate import Cost, Estimate, estimate, needed_weights, net_of, passes_of
from vicinal.benchmarks.place import CHOICE, MODEL, TAUGHT, Place
from vicinal.benchmarks.plan import plan
from vicinal.benchmarks.spec import Row, Setting, Spec
from vicinal.models.backbones import build_classifier, preprocessing_for

ROWS = (Row("ERM", "erm"), Row("Soft", "soft"), Row("VNL", "vnl"))
SPEC = Spec("made", "Made", seeds=2, settings=(Setting("Digits", "digits"),), rows=ROWS)


@pytest.mark.parametrize("name", ["small", "small_ln", "resnet18", "efficientnet_lite0"])
def test_parameters_are_those_of_the_net(name: str) -> None:
    preprocessing = preprocessing_for(name)
    built = build_classifier(name, 3, preprocessing=preprocessing).features
    assert net_of(name, preprocessing).parameters == sum(p.numel() for p in built.parameters())


def test_operations_are_those_that_are_published() -> None:
    net = net_of("resnet18", preprocessing_for("resnet18"))
    assert net.operations == pytest.approx(2 * 1.81e9, rel=0.02)  # He et al., Table 1: 1.8e9 multiply-adds
    larger = net_of("resnet18", preprocessing_for("resnet18", size=448))
    assert larger.operations == pytest.approx(4 * net.operations, rel=0.01)
    assert larger.activations == pytest.approx(4 * net.activations, rel=0.01)


def test_nothing_is_computed_for_it() -> None:
    before = torch.random.get_rng_state()
    net_of("resnet34", preprocessing_for("resnet34"))  # 21 million weights that are never drawn
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("method", "passes"),
    [("erm", 1), ("soft", 4), ("tent", 3), ("memo", 33 + 64), ("cotta", 37), ("tast", 1)],
)
def test_passes_are_what_the_method_states(method: str, passes: int) -> None:
    assert passes_of(method) == passes


def of(spec: Spec, folder: Path, device: str = "cpu") -> Estimate:
    return estimate(plan(spec), Place(folder), device)


def test_counts_are_those_of_the_plan(tmp_path: Path) -> None:
    found = of(SPEC, tmp_path)
    # Five sources: two are left out of each of three models; soft chooses its step size for each seed.
    assert (found.trainings, found.left_out, found.step_sizes, found.measurements) == (2, 6, 2, 6)
    once = of(replace(SPEC, one_choice=True), tmp_path)
    assert (once.trainings, once.left_out, once.step_sizes, once.measurements) == (2, 3, 1, 6)
    assert once.seconds < found.seconds
    alone = of(replace(SPEC, rows=(Row("ERM", "erm"),)), tmp_path)
    assert (alone.trainings, alone.left_out, alone.step_sizes, alone.measurements) == (2, 0, 0, 2)
    done = frozenset((run.key, target) for run in plan(SPEC).measures for target in run.results)
    nothing = estimate(plan(SPEC), Place(tmp_path), "cpu", done)
    assert (nothing.trainings, nothing.measurements, nothing.seconds) == (0, 0, 0)


def test_what_was_taught_already_costs_nothing_again(tmp_path: Path) -> None:
    once, place = replace(SPEC, one_choice=True), Place(tmp_path)
    (chooser, _), whole = plan(once).trainings, of(once, tmp_path)
    teaching = estimate(plan(once), place, "cpu", teach=True)
    assert (teaching.trainings, teaching.left_out, teaching.step_sizes, teaching.measurements) == (0, 3, 1, 0)
    assert teaching.disk == pytest.approx(whole.disk * 3 / 5)
    place.model(chooser.key).mkdir(parents=True)
    for name in (TAUGHT, CHOICE):
        (place.model(chooser.key) / name).touch()
    # The step size is still to be chosen: on left-out models that are not here, unless some are.
    rest = of(once, tmp_path)
    assert (rest.trainings, rest.left_out, rest.step_sizes) == (2, 3, 1)
    (place.left_out / "on-15").mkdir(parents=True)
    (place.left_out / "on-15" / MODEL).touch()
    later = of(once, tmp_path)
    assert (later.trainings, later.left_out, later.step_sizes) == (2, 0, 1)
    assert whole.seconds > rest.seconds > later.seconds
    assert whole.seconds - teaching.seconds == pytest.approx(
        later.seconds - Cost(chooser, "cpu").choosing("soft")
    )
    # A model of an earlier version has it inside: none is trained to have it in a file too.
    (place.model(chooser.key) / TAUGHT).unlink()
    (place.model(chooser.key) / MODEL).touch()
    assert of(once, tmp_path).left_out == 0


def test_more_to_do_takes_longer_and_workers_share_it(tmp_path: Path) -> None:
    one = of(SPEC, tmp_path)
    assert of(replace(SPEC, seeds=4), tmp_path).seconds == pytest.approx(2 * one.seconds)
    longer = replace(SPEC, settings=(replace(SPEC.settings[0], training={"iterations": 2000}),))
    assert of(longer, tmp_path).seconds > 3 * one.seconds
    assert one.wall(2) == pytest.approx(max(one.seconds / 2, one.longest))
    assert one.wall(1000) == one.longest < one.seconds
    big = replace(SPEC, settings=(Setting("PACS", "pacs", backbone="resnet50"),))
    assert of(big, tmp_path, "cuda").seconds < of(big, tmp_path).seconds / 100
    assert of(big, tmp_path).memory > 10 * one.memory
    assert of(big, tmp_path).disk > 100 * one.disk


def test_the_time_of_a_real_run_is_of_that_order(tmp_path: Path) -> None:
    (run, _), (_, soft, _, *_) = plan(SPEC).trainings, plan(SPEC).measures
    cost = Cost(run, "cpu")
    # On one core: 200 iterations of the small net take some seconds, a stream of soft some seconds too.
    assert 5 < 6 * cost.left_out() + cost.teaching() < 500
    assert 0.5 < cost.measuring(soft) < 50


def test_a_cap_on_images_counts(tmp_path: Path) -> None:
    few = Setting("MNIST", "rotated_mnist", data_options={"test": "100"})
    many, capped = (
        Cost(plan(replace(SPEC, settings=(setting,))).trainings[0], "cpu")
        for setting in (Setting("MNIST", "rotated_mnist"), few)
    )
    run = plan(replace(SPEC, settings=(few,))).measures[0]
    assert capped.measuring(run) == pytest.approx(many.measuring(run) / 100, rel=0.3)


def test_weights_to_start_from_are_named() -> None:
    settings = (
        Setting("A", "pacs", (("photo",),), backbone="resnet18", weights="timm"),
        Setting("B", "pacs", (("photo",),), backbone="resnet50_v1", weights="some/file.safetensors"),
        Setting("C", "digits"),
    )
    assert needed_weights(plan(replace(SPEC, settings=settings))) == ["resnet18", "some/file.safetensors"]
