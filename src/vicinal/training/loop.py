"""The loop: repeat a step, validate on source data, save, stop and resume."""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from vicinal.data.domains import LabelledImages, SourceDomain
from vicinal.data.episodes import Batch, Episode, Episodes
from vicinal.data.transforms import to_float
from vicinal.errors import TrainingError
from vicinal.graphs import Recorder
from vicinal.models.classifier import Classifier
from vicinal.training.average import EVERY, averages, take_average
from vicinal.training.learner import Learner, Stage, Step, Terms, set_rate
from vicinal.training.progress import Progress, StopRequest
from vicinal.training.scalars import Scalars
from vicinal.training.state import Best, Facts, load_state, save_state

EVALUATION_BATCH = 256
CHECK_EVERY = EVERY  # iterations: where weights are averaged the device is waited for as well


class StoppedError(TrainingError):
    """The user asked to stop; the state is on disk."""


def run_stage(
    stage: Stage,
    learner: Learner,
    sources: Sequence[SourceDomain],
    folder: Path | None,
    progress: Progress,
    stop: StopRequest,
    *,
    resume: bool = False,
    facts: Facts | None = None,
) -> Best:
    """Train to the end of a stage; leave the best weights by source validation, or an average of the last."""
    path = None if folder is None else folder / f"state-{stage.name}.safetensors"
    best, facts, done = Best(), {**(facts or {}), "domains": _counts(sources)}, 0
    if resume and path is not None and path.exists():
        done = load_state(path, learner, best, stage.name, facts)
    scalars, step = Scalars(folder), recorded(stage, learner)
    before, started = learner.seconds, time.perf_counter()
    progress.start(stage.name, learner.config.iterations, done)
    try:
        for iteration, episode in enumerate(_episodes(stage, learner, sources, done), start=done + 1):
            _iterate(stage, step, learner, sources, episode, best, iteration, progress, scalars)
            learner.seconds = before + time.perf_counter() - started
            last = iteration == learner.config.iterations
            if path is not None and (last or stop.asked or iteration % learner.config.save_every == 0):
                save_state(path, learner, best, stage.name, iteration, facts)
            if stop.asked and not last:
                where = "" if path is None else f"; {path} holds its state: go on with --resume"
                raise StoppedError(f"stopped at iteration {iteration} of {learner.config.iterations}{where}")
    finally:
        scalars.close()
    if learner.average is not None:
        take_average(learner.average, learner.parts, sources, 2 * learner.config.batch_size)
        best.offer(learner, validation_accuracy(learner.model, sources), learner.config.iterations)
    best.restore(learner)
    return best


def _episodes(
    stage: Stage, learner: Learner, sources: Sequence[SourceDomain], done: int
) -> Iterator[Episode]:
    config = learner.config
    episodes = Episodes(sources, stage.drawing, config.batch_size, config.augment, learner.device)
    return episodes.starting_at(learner.draws.get_state(), config.iterations - done)


def _counts(sources: Sequence[SourceDomain]) -> dict[str, int]:
    return {source.name: len(source.train) for source in sources}


def recorded(stage: Stage, learner: Learner) -> Step:
    """Return the step of a stage, on a GPU recorded after its first runs: it is the same work every time."""
    recorder = Recorder((learner.noise,))

    def on_tensors(*tensors: Tensor) -> dict[str, Tensor]:
        pairs = [Batch(*tensors[start : start + 2]) for start in range(0, len(tensors), 2)]
        return dict(stage.step(learner, tuple(pairs)))

    def step(_: Learner, batches: tuple[Batch, ...]) -> Terms:
        return recorder.run(on_tensors, *(tensor for batch in batches for tensor in batch))

    return step


def _iterate(
    stage: Stage,
    step: Step,
    learner: Learner,
    sources: Sequence[SourceDomain],
    episode: Episode,
    best: Best,
    iteration: int,
    progress: Progress,
    scalars: Scalars,
) -> None:
    config, started = learner.config, time.perf_counter()
    learner.model.train(not stage.fixed_model)
    if learner.auxiliary is not None:
        learner.auxiliary.train()
    set_rate(learner, (iteration - 1) / config.iterations)
    terms = step(learner, episode.batches)
    # Later episodes may be drawn already: what a resumed run goes on from is the state after this one.
    learner.draws.set_state(episode.state)
    validate = iteration % config.validate_every == 0 or iteration == config.iterations
    if iteration % CHECK_EVERY and not validate:
        return
    values = _finite(terms, iteration)
    if learner.average is not None and averages(config, iteration):
        learner.average.update_parameters(nn.ModuleDict(learner.parts))
    rate = 2 * config.batch_size / (time.perf_counter() - started)
    if validate:
        accuracy = None if stage.fixed_model else validation_accuracy(learner.model, sources)
        if accuracy is not None:
            values["validation"] = accuracy
        if learner.average is None:
            best.offer(learner, accuracy, iteration)
    scalars.write(iteration, {f"{stage.name}/{name}": value for name, value in values.items()})
    progress.advance(iteration, values, rate)


def _finite(terms: Terms, iteration: int) -> dict[str, float]:
    values = {name: float(value) for name, value in terms.items()}
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise TrainingError(
            f"the loss ({', '.join(bad)}) is not finite at iteration {iteration}: "
            "lower the learning rates (what was saved before is as it was)"
        )
    return values


def validation_accuracy(model: Classifier, sources: Sequence[SourceDomain]) -> float | None:
    """Return the accuracy on the sources' validation data, a mean over domains; None without any."""
    parts = [source.val for source in sources if len(source.val)]
    if not parts:
        return None
    return sum(accuracy_on(model, part) for part in parts) / len(parts)


@torch.no_grad()
def accuracy_on(model: Classifier, part: LabelledImages) -> float:
    """Return the share of labelled images that the model in evaluation mode gets right."""
    model.eval()
    device = next(model.parameters()).device
    right = 0
    for start in range(0, len(part), EVALUATION_BATCH):
        x = to_float(part.images[start : start + EVALUATION_BATCH], device)
        y = part.labels[start : start + EVALUATION_BATCH].to(device)
        right += int((model(x).argmax(-1) == y).sum())
    return right / len(part)
