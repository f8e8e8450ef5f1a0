"""Training from start to end on a subset of the digits, a few iterations each."""

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from vicinal.adapters.methods import adapt
from vicinal.checkpoint import Trained, load, read_tensors, taught_of
from vicinal.data import pixels
from vicinal.data.digits import load_digits_domains
from vicinal.data.domains import Domain, DomainSet, Roles, SourceDomain, assign_roles
from vicinal.errors import ConfigError, TrainingError, UnknownNameError
from vicinal.models.backbones import preprocessing_for
from vicinal.training.config import OutOfFoldConfig, TrainConfig
from vicinal.training.progress import Silent, StopRequest
from vicinal.training.train import ModelSpec, Run, derived_seed, left_out_fold, placed, train

MakeSources = Callable[..., list[SourceDomain]]
TensorsOf = Callable[[Trained], dict[str, Tensor]]
SameTensors = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], bool]
ANGLES = (0, 30, 60, 90)
CONFIG = TrainConfig(algorithm="meta", iterations=12, batch_size=20, group_size=10, validate_every=10)
CHOOSING = OutOfFoldConfig(
    batch_size=20, stream_images=60, epochs=4, step_sizes=(1e-3,), baselines=("soft",), hardenings=("noisy",)
)


def subset(domain: Domain) -> Domain:
    return replace(domain, train=domain.train[:150], val=domain.val[:40], test=domain.test[:60])


@pytest.fixture(scope="module")
def digits() -> DomainSet:
    data = load_digits_domains(size=8, angles=ANGLES)
    return replace(data, domains={name: subset(domain) for name, domain in data.domains.items()})


@pytest.fixture(scope="module")
def roles(digits: DomainSet) -> Roles:
    return assign_roles(digits, ["90"])


@pytest.fixture(scope="module")
def digits_spec(roles: Roles) -> ModelSpec:
    return ModelSpec("small", "none", preprocessing_for("small", channels=1, size=8), roles.classes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def trained(digits_spec: ModelSpec, roles: Roles, folder: Path) -> Trained:
    facts = {"dataset": "digits", "targets": ["90"]}
    return train(digits_spec, roles.sources, CONFIG, CHOOSING, folder=folder, provenance=facts)


def test_a_trained_model_has_everything_that_travels_with_it(trained: Trained) -> None:
    assert not trained.model.training
    assert trained.phi is not None
    assert trained.anchor_phi is not None
    assert trained.predict_phi is not None
    assert trained.backbone == "small"
    assert trained.algorithm == "meta"
    assert trained.classes == tuple("0123456789")
    assert set(trained.choice["methods"]) == {"vnl", "soft"}
    assert sum(row["chosen"] for row in trained.choice["table"] if row["method"] == "vnl") == 1
    kinds = ("", " Dirichlet 1", " noisy")
    assert trained.choice["streams"] == [f"{angle}{kind}" for angle in (0, 30, 60) for kind in kinds]
    assert trained.config["train"]["iterations"] == 12
    assert trained.config["out_of_fold"]["stream_images"] == 60
    facts = trained.provenance
    assert facts["sources"] == ["0", "30", "60"]
    assert (facts["dataset"], facts["targets"], facts["seed"]) == ("digits", ["90"], 0)
    assert 0 <= facts["validation_accuracy"] <= 1
    assert facts["selected_iteration"] in (10, 12)
    assert {"torch", "vicinal"} <= set(trained.versions)


def test_it_has_learned_something(trained: Trained, roles: Roles) -> None:
    assert trained.provenance["validation_accuracy"] > 0.3  # chance is 0.1


def test_the_saved_file_gives_the_same_logits_and_the_same_adaptation(
    trained: Trained, roles: Roles, folder: Path, tensors_of: TensorsOf, same_tensors: SameTensors
) -> None:
    loaded = load(folder / "model.safetensors")
    assert same_tensors(tensors_of(loaded), tensors_of(trained))
    x = roles.targets[0].images[:].float() / 255
    with torch.no_grad():
        assert torch.equal(loaded.model(x), trained.model(x))
    for method in ("erm", "vnl", "vnl_paper", "labels", "soft"):
        assert torch.equal(adapt(loaded, method)(x[:20]), adapt(trained, method)(x[:20])), method
    for name in ("choice", "config", "provenance", "versions", "classes", "preprocessing", "algorithm"):
        assert getattr(loaded, name) == getattr(trained, name), name


def test_every_left_out_model_is_on_disk(trained: Trained, folder: Path) -> None:
    for angle in (0, 30, 60):
        rest = [str(other) for other in (0, 30, 60) if other != angle]
        (path,) = (folder / "left_out").glob(f"on-{'-'.join(rest)}-*")
        left_out = load(path)
        assert left_out.provenance["sources"] == rest
        assert left_out.config["train"]["seed"] != CONFIG.seed


class InterruptIn(Silent):
    """Presses Ctrl-C during the n-th left-out model, and keeps the notes."""

    def __init__(self, after: int | None) -> None:
        self.after, self.notes = after, list[str]()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, done: int, terms: Mapping[str, float], images_per_second: float | None = None) -> None:
        if self.after is not None and len(self.notes) == self.after and done == 10:
            signal.raise_signal(signal.SIGINT)


def test_a_run_resumed_after_two_left_out_models_ends_the_same(
    trained: Trained,
    digits_spec: ModelSpec,
    roles: Roles,
    tmp_path: Path,
    tensors_of: TensorsOf,
    same_tensors: SameTensors,
) -> None:
    with pytest.raises(TrainingError, match=r"stopped at iteration 10 of 12.*on-0-30-"):
        train(digits_spec, roles.sources, CONFIG, CHOOSING, folder=tmp_path, progress=InterruptIn(3))
    assert not (tmp_path / "model.safetensors").exists()
    finished = tmp_path.glob("left_out/*/model.safetensors")
    done = sorted(path.parent.name.rsplit("-", 1)[0] for path in finished)
    assert done == ["on-0-60", "on-30-60"]
    progress = InterruptIn(None)
    resumed = train(
        digits_spec, roles.sources, CONFIG, CHOOSING, folder=tmp_path, resume=True, progress=progress
    )
    assert progress.notes == ["left-out model without-60"]
    assert same_tensors(tensors_of(resumed), tensors_of(trained))
    assert resumed.choice == trained.choice
    assert same_tensors(tensors_of(load(tmp_path)), tensors_of(trained))


def test_with_what_was_taught_before_no_left_out_model_is_trained(
    trained: Trained, digits_spec: ModelSpec, roles: Roles, folder: Path, tmp_path: Path
) -> None:
    taught, progress = taught_of(load(folder)), InterruptIn(None)
    facts = {"dataset": "digits", "targets": ["90"]}
    again = train(
        digits_spec, roles.sources, CONFIG, taught, folder=tmp_path, progress=progress, provenance=facts
    )
    assert progress.notes == []
    assert not (tmp_path / "left_out").exists()
    (tensors, header), (same, told) = (read_tensors(one / "model.safetensors") for one in (folder, tmp_path))
    assert tensors.keys() == same.keys()
    assert all(torch.equal(same[name], value) for name, value in tensors.items())
    for one in (header, told):
        one["provenance"].pop("training_seconds")
    assert told == header
    assert again.choice == trained.choice


def test_resuming_a_finished_run_gives_it_back(
    trained: Trained,
    digits_spec: ModelSpec,
    roles: Roles,
    folder: Path,
    tensors_of: TensorsOf,
    same_tensors: SameTensors,
) -> None:
    facts = {"dataset": "digits", "targets": ["90"]}
    again = train(digits_spec, roles.sources, CONFIG, CHOOSING, folder=folder, resume=True, provenance=facts)
    assert same_tensors(tensors_of(again), tensors_of(trained))
    assert (again.choice, again.provenance) == (trained.choice, trained.provenance)


def test_the_same_seed_gives_the_same_result_and_another_seed_another(
    trained: Trained, digits_spec: ModelSpec, roles: Roles, tensors_of: TensorsOf, same_tensors: SameTensors
) -> None:
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    again = train(digits_spec, roles.sources, CONFIG, CHOOSING)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert same_tensors(tensors_of(again), tensors_of(trained))
    assert again.choice == trained.choice
    other = train(digits_spec, roles.sources, replace(CONFIG, seed=1), CHOOSING)
    moved = [
        name for name, value in tensors_of(other).items() if not torch.equal(value, tensors_of(trained)[name])
    ]
    assert {name.partition(".")[0] for name in moved} == {"model", "phi", "anchor_phi", "predict_phi"}


@pytest.mark.parametrize("what", ["labels", "images"])
def test_nothing_of_a_target_reaches_training(
    what: str,
    trained: Trained,
    digits: DomainSet,
    digits_spec: ModelSpec,
    tensors_of: TensorsOf,
    same_tensors: SameTensors,
) -> None:
    target = digits.domains["90"]
    garbage = {"labels": (target.labels * 7 + 3) % 10, "images": 255 - target.images}
    assert not torch.equal(garbage[what], getattr(target, what))
    poisoned = replace(digits, domains={**digits.domains, "90": replace(target, **{what: garbage[what]})})
    again = train(digits_spec, assign_roles(poisoned, ["90"]).sources, CONFIG, CHOOSING)
    assert same_tensors(tensors_of(again), tensors_of(trained))
    assert again.choice == trained.choice


def test_labels_of_a_source_do_reach_training(
    trained: Trained,
    digits: DomainSet,
    digits_spec: ModelSpec,
    tensors_of: TensorsOf,
    same_tensors: SameTensors,
) -> None:
    # The test above can only be believed if this one holds.
    source = digits.domains["0"]
    poisoned = replace(
        digits, domains={**digits.domains, "0": replace(source, labels=(source.labels * 7 + 3) % 10)}
    )
    again = train(digits_spec, assign_roles(poisoned, ["90"]).sources, CONFIG, CHOOSING)
    assert not same_tensors(tensors_of(again), tensors_of(trained))


def test_train_takes_source_domains_and_nothing_that_holds_a_target(
    digits_spec: ModelSpec, roles: Roles, digits: DomainSet
) -> None:
    hints = get_type_hints(train)
    assert hints["sources"] == Sequence[SourceDomain]
    assert not any(word in str(hint) for hint in hints.values() for word in ("Roles", "Target", "DomainSet"))
    wrong: Any
    for wrong in (roles.targets, list(digits.domains.values()), roles):
        with pytest.raises((AttributeError, TypeError)):
            train(digits_spec, wrong, CONFIG)


@pytest.mark.parametrize(("algorithm", "has_phi"), [("erm", False), ("neighbor", True)])
def test_without_out_of_fold_there_is_a_model_and_no_choice(
    algorithm: str, has_phi: bool, digits_spec: ModelSpec, roles: Roles
) -> None:
    made = train(digits_spec, roles.sources, replace(CONFIG, algorithm=algorithm))
    assert (made.phi is not None) == has_phi
    if made.phi is not None:
        assert made.phi.shape["layers"] == 3
        fewer = train(digits_spec, roles.sources, replace(CONFIG, algorithm=algorithm, phi_layers=2)).phi
        assert fewer is not None
        assert len(fewer.trunk) == 0
    assert made.anchor_phi is None
    assert made.predict_phi is None
    assert made.choice == {}
    assert made.algorithm == algorithm


def test_an_unknown_algorithm_is_named(digits_spec: ModelSpec, roles: Roles) -> None:
    with pytest.raises(UnknownNameError, match="algorithm 'erk': choose from erm, meta, neighbor"):
        train(digits_spec, roles.sources, replace(CONFIG, algorithm="erk"))


def test_parts_of_a_run_have_seeds_of_their_own() -> None:
    seeds = [
        derived_seed(seed, name) for seed in range(20) for name in ("erm", "phi", "streams", "without-0")
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert derived_seed(0, "erm") == derived_seed(0, "erm")


class Started(Silent):
    """Notes which tasks were begun."""

    def __init__(self) -> None:
        self.tasks = list[str]()

    def start(self, task: str, total: int, done: int = 0) -> None:
        self.tasks.append(task)


@pytest.mark.parametrize("change", [{"leave_out": 3}, {"baselines": ("sofft",)}])
def test_an_impossible_choice_is_refused_before_anything_is_trained(
    change: dict[str, Any], digits_spec: ModelSpec, roles: Roles
) -> None:
    progress = Started()
    with pytest.raises((ConfigError, UnknownNameError)):
        train(digits_spec, roles.sources, CONFIG, replace(CHOOSING, **change), progress=progress)
    assert progress.tasks == []


def test_sources_go_where_the_model_is_with_their_store_once(roles: Roles) -> None:
    stores = {id(source.train.images.store) for source in roles.sources}
    moved = placed(roles.sources, "meta")
    assert [source.name for source in moved] == [source.name for source in roles.sources]
    for old, new in zip(roles.sources, moved, strict=True):
        assert new.train.images.store is new.val.images.store
        assert new.train.images.device.type == new.val.images.device.type == "meta"
        assert torch.equal(new.train.images.positions, old.train.images.positions)
        assert torch.equal(new.val.images.positions, old.val.images.positions)
        assert new.train.labels is old.train.labels
        assert new.val.labels is old.val.labels
    assert len({id(source.train.images.store) for source in moved}) == len(stores)
    for old, new in zip(roles.sources, placed(roles.sources, "cpu"), strict=True):
        assert new.train.images.store is old.train.images.store


def test_sources_that_do_not_fit_on_the_device_stay(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "free_memory", lambda device: 1000)
    for old, new in zip(roles.sources, placed(roles.sources, "cuda"), strict=True):
        assert new.train.images is old.train.images
        assert new.val.images is old.val.images


def test_two_sources_are_enough_for_the_default_algorithm(digits_spec: ModelSpec, roles: Roles) -> None:
    assert train(digits_spec, roles.sources[:2], CONFIG, CHOOSING).predict_phi is not None


def test_left_out_models_of_other_images_are_not_taken_for_these(
    spec: ModelSpec, make_sources: MakeSources, tmp_path: Path
) -> None:
    """Whatever they are fed makes another model, also where a run goes on."""
    config, sources = TrainConfig(algorithm="erm", iterations=2, batch_size=6), make_sources(2, 32, 8)
    run = Run(tmp_path, Silent(), StopRequest(), torch.device("cpu"), resume=True)
    sharper = replace(spec, preprocessing=replace(spec.preprocessing, std=(0.1,)))
    for fed in (spec, sharper, spec):
        fold = left_out_fold(fed, sources, (0,), config, run)
        assert fold.trained.preprocessing == fed.preprocessing
    assert len(list(tmp_path.glob("left_out/on-*"))) == 2


def left_out_run(folder: Path, **options: Any) -> Run:
    return Run(folder, InterruptIn(None), StopRequest(), torch.device("cpu"), resume=True, **options)


def notes(run: Run) -> list[str]:
    assert isinstance(run.progress, InterruptIn)
    return run.progress.notes


TINY = TrainConfig(algorithm="erm", iterations=2, batch_size=6)


def test_a_run_whose_data_were_moved_takes_its_left_out_models_and_a_shared_folder_does_not(
    spec: ModelSpec, make_sources: MakeSources, tmp_path: Path
) -> None:
    sources = make_sources(2, 32, 8)
    for shared, times in ((None, 1), (tmp_path / "shared", 2)):
        run = left_out_run(tmp_path / "own", left_out=shared)
        for place in ("/here", "/there", "/here"):
            left_out_fold(spec, sources, (0,), TINY, run, {"dataset": place})
        assert len(notes(run)) == times


def test_a_left_out_model_of_other_counts_of_images_is_trained_again(
    spec: ModelSpec, make_sources: MakeSources, tmp_path: Path
) -> None:
    run = left_out_run(tmp_path, left_out=tmp_path / "shared")
    for count in (24, 24, 32):
        left_out_fold(spec, make_sources(2, count, 8), (0,), TINY, run)
    made, other, again = notes(run)
    assert made == again == "left-out model without-d0"
    assert other.endswith("trained on other images, so it is trained again")


@pytest.mark.parametrize("name", ["hospital-north-ward", "\N{HOSPITAL}" * 20, "../../ward", "north\\ward"])
def test_left_out_models_of_many_domains_have_names_that_a_disk_takes(
    name: str, spec: ModelSpec, make_sources: MakeSources, tmp_path: Path
) -> None:
    sources = [replace(one, name=f"{name}-{index}") for index, one in enumerate(make_sources(14, 8, 8))]
    run = left_out_run(tmp_path)
    for without in ((0, 1), (12, 13), (0, 1)):
        left_out_fold(spec, sources, without, TINY, run)
    assert len(notes(run)) == len(list(tmp_path.glob("left_out/on-*"))) == 2


def test_left_out_models_may_train_for_shorter(
    spec: ModelSpec, make_sources: MakeSources, tmp_path: Path
) -> None:
    out_of_fold = OutOfFoldConfig(
        batch_size=8, epochs=2, step_sizes=(1e-3,), updates=("none",), baselines=(), left_out_iterations=3
    )
    config = TrainConfig(algorithm="erm", iterations=6, batch_size=6)
    trained = train(spec, make_sources(2, train=32, val=8), config, out_of_fold, folder=tmp_path)
    left_out = [load(folder) for folder in sorted((tmp_path / "left_out").glob("on-*"))]
    assert [model.config["train"]["iterations"] for model in (trained, *left_out)] == [6, 3, 3]
