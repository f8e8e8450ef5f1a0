"""Choosing the rule of test time by simulated online adaptation on left-out domains.

Every candidate runs over the streams that left-out models never saw. What is compared: how the model is
updated (or not), the step size, whether its own output or the labels predict. The table travels with the
checkpoint, so that the choice can be checked.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vicinal.adapters.contract import METHODS, Adapter, configure
from vicinal.adapters.labeler import StreamLabeler
from vicinal.adapters.vnl import Vnl, VnlSettings
from vicinal.checkpoint import Trained
from vicinal.models.inference import StreamInferenceNet
from vicinal.training.config import OutOfFoldConfig
from vicinal.training.fit_phi import fit_phi
from vicinal.training.left_out import LeftOutStream, Lesson, Played, play_all
from vicinal.training.progress import Progress
from vicinal.types import Head


@dataclass(frozen=True)
class Row:
    """One line of the table behind the choice: a candidate and how it did on the left-out streams."""

    method: str
    update: str
    lr: float
    follow: float
    statistics: str
    predict: str
    accuracy: float
    nll: float
    worst: float  # accuracy on the stream where it did worst
    chosen: bool = False


@dataclass(frozen=True)
class Chosen:
    """The fitted phis, the settings of every method, and the table."""

    anchor_phi: StreamInferenceNet
    predict_phi: StreamInferenceNet
    methods: dict[str, dict[str, dict[str, Any]]]  # method -> statistics -> options
    table: list[Row]


def choose_rule(
    streams: Sequence[LeftOutStream], config: OutOfFoldConfig, seed: int, progress: Progress
) -> Chosen:
    """Fit phi, try every candidate, fit phi again in the loop of the best one, and decide who predicts."""
    candidates = _candidates(config)
    baselines = [(name, lr) for name in config.baselines for lr in config.step_sizes]
    progress.start("choose", len(candidates) + 2 * len(baselines) + 4)
    still = play_all(partial(_vnl, settings=VnlSettings(update="none", predict="own")), streams)
    anchor_phi = fit_phi([played.lesson for played in still], config, seed)
    progress.advance(1, {})
    rows, plays = [], []
    for done, settings in enumerate(candidates):
        ready = [
            replace(stream, trained=replace(stream.trained, anchor_phi=anchor_phi)) for stream in streams
        ]
        plays.append(play_all(partial(_vnl, settings=settings), ready))
        rows.append(_row("vnl", settings.update, settings, streams, plays[-1]))
        progress.advance(2 + done, {"accuracy": rows[-1].accuracy})
    best = max(range(len(rows)), key=lambda index: (rows[index].accuracy, -rows[index].nll))
    lessons = [played.lesson for played in plays[best]]
    by_labels = _cross_fitted(lessons, config, seed)
    rows.append(replace(rows[best], predict="labels", **_scores(streams, by_labels)))
    final = rows[-1] if rows[-1].accuracy >= rows[best].accuracy else rows[best]
    rows = [replace(row, chosen=row is final) for row in rows]
    predict_phi = fit_phi(lessons, config, seed)
    progress.advance(4 + len(candidates), {"accuracy": final.accuracy})
    methods = {
        "vnl": {kind: _options(final, ("update", "lr", "follow", "predict")) for kind in ("stream", "batch")}
    }
    for method, lr in baselines:
        for kind in ("batch", "stream"):
            rows.append(_try_baseline(method, lr, kind, streams))
            progress.advance(progress_of(rows, candidates), {"accuracy": rows[-1].accuracy})
    for method in config.baselines:
        methods[method] = {kind: _best_options(rows, method, kind) for kind in ("batch", "stream")}
    return Chosen(anchor_phi, predict_phi, methods, _mark(rows, methods))


def progress_of(rows: Sequence[Row], candidates: Sequence[VnlSettings]) -> int:
    """Return how many steps of the choice are behind, the fits counted."""
    return len(rows) + 3 if len(rows) > len(candidates) else len(rows) + 1


def _candidates(config: OutOfFoldConfig) -> list[VnlSettings]:
    made = []
    for update in config.updates:
        if update == "none":
            made.append(VnlSettings(update="none", predict="own"))
            continue
        for lr in config.step_sizes:
            for follow in config.follow if update == "anchored" else (0.0,):
                made.append(VnlSettings(update=update, predict="own", lr=lr, follow=follow))
    return made


def _vnl(trained: Trained, settings: VnlSettings) -> Adapter:
    return Vnl(trained, settings)


def _try_baseline(method: str, lr: float, kind: str, streams: Sequence[LeftOutStream]) -> Row:
    settings = configure(METHODS[method].defaults, {"lr": lr, "statistics": kind})
    build: Callable[[Trained], Adapter] = partial(METHODS[method].build, settings=settings)
    return _row(method, method, settings, streams, play_all(build, streams))


def _row(
    method: str, update: str, settings: Any, streams: Sequence[LeftOutStream], plays: Sequence[Played]
) -> Row:
    scores = _scores(streams, [played.probabilities for played in plays])
    follow = getattr(settings, "follow", 0.0)
    return Row(method, update, settings.lr, follow, settings.statistics.kind, settings.predict, **scores)


def _scores(streams: Sequence[LeftOutStream], probabilities: Sequence[Tensor]) -> dict[str, float]:
    accuracies, nlls = [], []
    for stream, p in zip(streams, probabilities, strict=True):
        y = stream.labels.to(p.device)
        accuracies.append(float((p.argmax(-1) == y).float().mean()))
        nlls.append(float(-p.gather(-1, y.unsqueeze(-1)).clamp_min(torch.finfo(p.dtype).tiny).log().mean()))
    count = len(accuracies)
    return {"accuracy": sum(accuracies) / count, "nll": sum(nlls) / count, "worst": min(accuracies)}


def _cross_fitted(lessons: Sequence[Lesson], config: OutOfFoldConfig, seed: int) -> list[Tensor]:
    """Return label predictions of every stream by a phi that was fitted on the other half of the streams."""
    halves = [list(range(start, len(lessons), 2)) for start in (0, 1)]
    outputs: dict[int, Tensor] = {}
    for mine, others in (halves, halves[::-1]):
        if not others:
            others = mine
        phi = fit_phi([lessons[index] for index in others], config, seed)
        outputs |= {index: label_lesson(phi, lessons[index]) for index in mine}
    return [outputs[index] for index in range(len(lessons))]


@torch.no_grad()
def label_lesson(phi: StreamInferenceNet, lesson: Lesson) -> Tensor:
    """Return the labels phi gives online along a recorded stream (M, C)."""
    labeler = StreamLabeler(phi, Head(lesson.head.weight[0], lesson.head.bias[0]))
    generator = torch.Generator(device=lesson.z.device).manual_seed(0)
    steps = zip(lesson.z, lesson.logits, lesson.head.weight, lesson.head.bias, strict=True)
    return torch.cat([labeler(z, logits, Head(w, b), 0, generator) for z, logits, w, b in steps])


def _options(row: Row, names: tuple[str, ...]) -> dict[str, Any]:
    values = asdict(row)
    return {name: values[name] for name in names}


def _best_options(rows: Sequence[Row], method: str, kind: str) -> dict[str, Any]:
    tried = [row for row in rows if row.method == method and row.statistics == kind]
    return {"lr": max(tried, key=lambda row: row.accuracy).lr}


def _mark(rows: Sequence[Row], methods: dict[str, dict[str, dict[str, Any]]]) -> list[Row]:
    """Return the rows with each method's choice marked."""
    return [
        row
        if row.method == "vnl"
        else replace(row, chosen=methods[row.method][row.statistics]["lr"] == row.lr)
        for row in rows
    ]
