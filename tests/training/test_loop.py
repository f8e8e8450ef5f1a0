"""The loop: which weights are kept, what stops it, what it writes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vicinal.checkpoint import read_tensors
from vicinal.data.domains import LabelledImages, SourceDomain
from vicinal.data.episodes import Batch, from_all
from vicinal.errors import TrainingError, VicinalError
from vicinal.models.backbones import build_classifier
from vicinal.training.algorithms.erm import ERM
from vicinal.training.config import TrainConfig
from vicinal.training.learner import Learner, Stage, Terms, make_learner
from vicinal.training.loop import accuracy_on, run_stage, validation_accuracy
from vicinal.training.progress import Silent, StopRequest
from vicinal.training.state import Best
from vicinal.training.train import ModelSpec, Run, train_model

MakeSources = Callable[..., list[SourceDomain]]
MakeRun = Callable[..., Run]
CONFIG = TrainConfig(
    algorithm="erm",
    iterations=25,
    batch_size=6,
    group_size=5,
    num_samples=2,
    validate_every=8,
    save_every=1000,
)


def make_stage_learner(spec: ModelSpec, stage: Stage, config: TrainConfig = CONFIG) -> Learner:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_classifier(spec.backbone, len(spec.classes), preprocessing=spec.preprocessing)
    return make_learner(model, None, stage, config, seed=0)


def run(
    stage: Stage,
    learner: Learner,
    sources: Sequence[SourceDomain],
    folder: Path | None = None,
    **options: Any,
) -> Best:
    return run_stage(stage, learner, sources, folder, Silent(), StopRequest(), **options)


def says(plan: Sequence[int]) -> Stage:
    """Return a stage after whose i-th step the model says plan[i] of every image."""
    taken = iter(plan)

    def step(learner: Learner, batches: tuple[Batch, ...]) -> Terms:
        with torch.no_grad():
            learner.model.head.weight.zero_()
            learner.model.head.bias.copy_(torch.eye(2)[next(taken)])
        return {"loss": torch.zeros(())}

    return Stage("scripted", from_all, step)


def with_val(source: SourceDomain, labels: Sequence[int]) -> SourceDomain:
    images = torch.zeros(len(labels), 1, 8, 8, dtype=torch.uint8)
    val = LabelledImages(images, torch.tensor(labels, dtype=torch.long))
    return SourceDomain(source.name, source.train, val)


def test_the_best_weights_by_validation_are_restored(spec: ModelSpec, make_sources: MakeSources) -> None:
    sources = [with_val(source, [0, 1, 1, 1]) for source in make_sources(2)]
    stage = says([0, 1, 1, 0])
    learner = make_stage_learner(spec, stage, replace(CONFIG, iterations=4, validate_every=1))
    best = run(stage, learner, sources)
    assert (best.accuracy, best.iteration) == (0.75, 2)  # the first of equals
    assert learner.model.head.bias.tolist() == [0.0, 1.0]


def test_weights_between_validations_do_not_count(spec: ModelSpec, make_sources: MakeSources) -> None:
    sources = [with_val(source, [1]) for source in make_sources(2)]
    stage = says([1, 0, 1, 0, 0])
    learner = make_stage_learner(spec, stage, replace(CONFIG, iterations=5, validate_every=2))
    best = run(stage, learner, sources)
    assert (best.accuracy, best.iteration) == (0.0, 2)


def test_every_domain_counts_the_same_in_validation(spec: ModelSpec, make_sources: MakeSources) -> None:
    one, other, third = make_sources(3)
    sources = [with_val(one, [0] * 9), with_val(other, [1]), with_val(third, [])]
    stage = says([0])
    learner = make_stage_learner(spec, stage, replace(CONFIG, iterations=1))
    assert run(stage, learner, sources).accuracy == 0.5
    assert accuracy_on(learner.model, sources[0].val) == 1.0
    assert validation_accuracy(learner.model, [sources[2]]) is None


def test_validation_beyond_one_batch_counts_every_image(spec: ModelSpec) -> None:
    learner = make_stage_learner(spec, says([]))
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (300, 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.randint(2, (300,), generator=generator)
    right = [
        int(learner.model.eval()(image[None].float() / 255).argmax()) == int(label)
        for image, label in zip(images, labels, strict=True)
    ]
    assert accuracy_on(learner.model, LabelledImages(images, labels)) == pytest.approx(sum(right) / 300)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_fixed_model_is_in_evaluation_mode_and_any_other_trains(
    fixed: bool, spec: ModelSpec, make_sources: MakeSources
) -> None:
    modes = []

    def step(learner: Learner, batches: tuple[Batch, ...]) -> Terms:
        modes.append(learner.model.training)
        return {"loss": torch.zeros(())}

    stage = Stage("watched", from_all, step, fixed_model=fixed)
    learner = make_stage_learner(spec, ERM, replace(CONFIG, iterations=5, validate_every=2))
    run(stage, learner, make_sources(2))
    assert modes == [not fixed] * 5  # validation in between changes the mode, and it is set again


def test_without_validation_data_the_last_weights_are_kept(
    spec: ModelSpec, make_sources: MakeSources
) -> None:
    sources = [with_val(source, []) for source in make_sources(2)]
    stage = says([1, 0, 1, 0, 1, 0])
    learner = make_stage_learner(spec, stage, replace(CONFIG, iterations=6, validate_every=3))
    assert run(stage, learner, sources).iteration == 6
    assert learner.model.head.bias.tolist() == [1.0, 0.0]


def test_without_validation_data_no_validation_accuracy_is_claimed(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun
) -> None:
    sources = [with_val(source, []) for source in make_sources(2)]
    trained = train_model(spec, sources, CONFIG, make_run(), {})
    assert trained.provenance.get("validation_accuracy") is None


def test_without_a_folder_a_stop_is_a_stop(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun
) -> None:
    with pytest.raises(TrainingError, match=r"stopped at iteration 8 of 25$"):
        train_model(spec, make_sources(), CONFIG, make_run(halt=("erm", 8)), {})


def test_a_stop_asked_for_in_the_last_iteration_is_a_finished_stage(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, tmp_path: Path
) -> None:
    trained = train_model(spec, make_sources(), CONFIG, make_run(tmp_path, halt=("erm", 25)), {})
    assert trained.provenance["selected_iteration"] > 0


def poisoned_after(good: int) -> Stage:
    """Return ERM whose loss and weights are NaN from step `good` + 1 on."""
    taken = 0

    def step(learner: Learner, batches: tuple[Batch, ...]) -> Terms:
        nonlocal taken
        taken += 1
        terms = ERM.step(learner, batches)
        if taken <= good:
            return terms
        with torch.no_grad():
            learner.model.head.weight.fill_(torch.nan)
        return {name: value * torch.nan for name, value in terms.items()}

    return Stage("erm", from_all, step)


@pytest.mark.parametrize("good", [12, 19])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_state(
    good: int, spec: ModelSpec, make_sources: MakeSources, tmp_path: Path
) -> None:
    stage, config = poisoned_after(good), replace(CONFIG, save_every=10, validate_every=20)
    with pytest.raises(TrainingError, match=r"classify.* not finite at iteration 20") as caught:
        run(stage, make_stage_learner(spec, stage, config), make_sources(), tmp_path)
    assert "\n" not in str(caught.value)
    tensors, header = read_tensors(tmp_path / "state-erm.safetensors")
    assert header["iteration"] == 10
    assert all(torch.isfinite(value).all() for value in tensors.values() if value.is_floating_point())


def test_weights_that_are_not_finite_never_reach_the_state(
    spec: ModelSpec, make_sources: MakeSources, tmp_path: Path
) -> None:
    # The save comes due at an iteration whose loss nobody looks at.
    stage, config = poisoned_after(12), replace(CONFIG, save_every=3, validate_every=20)
    with pytest.raises(VicinalError, match="not finite"):
        run(stage, make_stage_learner(spec, stage, config), make_sources(), tmp_path)
    assert read_tensors(tmp_path / "state-erm.safetensors")[1]["iteration"] == 12


def test_scalars_are_written_for_people_and_for_tensorboard(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained = train_model(spec, make_sources(), CONFIG, make_run(tmp_path), {})
    lines = [json.loads(line) for line in (tmp_path / "scalars.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [8, 10, 16, 20, 24, 25]
    validated = {line["step"]: line["erm/validation"] for line in lines if "erm/validation" in line}
    assert list(validated) == [8, 16, 24, 25]
    assert max(validated.values()) == trained.provenance["validation_accuracy"]
    assert validated[trained.provenance["selected_iteration"]] == max(validated.values())
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"erm/classify", "erm/validation"}
    drawn = {event.step: event.value for event in events.Scalars("erm/classify")}
    assert drawn == pytest.approx({line["step"]: line["erm/classify"] for line in lines})


def test_without_a_folder_nothing_is_written(
    spec: ModelSpec,
    make_sources: MakeSources,
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    train_model(spec, make_sources(), CONFIG, make_run(), {})
    assert not list(tmp_path.iterdir())
