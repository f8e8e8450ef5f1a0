"""Choosing the rule of test time by simulated online adaptation on left-out domains.

Every candidate runs over the streams that left-out models never saw. What is compared: how the model is
updated (or not), the step size, how the first steps are taken, and who predicts: its own output, labels by
phi or votes of neighbors. The table travels with the checkpoint, so that the choice can be checked.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor

from vicinal.adapters.methods import METHODS, configure
from vicinal.adapters.settings import Settings
from vicinal.adapters.statistics import KINDS
from vicinal.adapters.vnl import Vnl
from vicinal.adapters.vnl_settings import UPDATES, VOTES, VnlSettings
from vicinal.functional.calibration import fitted_temperature
from vicinal.functional.losses import label_cross_entropy
from vicinal.functional.shares import mean_square, sharpened
from vicinal.models.inference import StreamInferenceNet
from vicinal.training.config import OutOfFoldConfig
from vicinal.training.fit_phi import fit_phi
from vicinal.training.left_out import LeftOutStream, Lesson, Played, play_all, predict_all
from vicinal.training.loop import StoppedError
from vicinal.training.predictors import PREDICTORS, After, fitted_without
from vicinal.training.progress import Progress, StopRequest
from vicinal.training.sureness import Sureness, Told, fitted_sureness, tempered_by


class Scores(NamedTuple):
    """How a candidate did on the left-out streams."""

    accuracy: float
    nll: float
    worst: float  # accuracy on the stream where it did worst
    temperature: float = 1.0  # by which its predictions are as sure as they should be, where that is asked


@dataclass(frozen=True)
class Row:
    """One line of the table behind the choice: a candidate and how it did on the left-out streams."""

    method: str
    update: str
    lr: float
    from_rest: bool
    statistics: str
    predict: str
    accuracy: float
    nll: float
    worst: float
    temperature: float = 1.0
    chosen: bool = False
    sureness: dict[str, float] | None = None  # of the rule chosen: how either way to be sure did


@dataclass(frozen=True)
class Chosen:
    """The fitted phis, the settings of every method, and the table."""

    anchor_phi: StreamInferenceNet
    predict_phi: StreamInferenceNet
    methods: dict[str, dict[str, dict[str, Any]]]  # method -> statistics -> options
    table: list[Row]


def choose_rule(
    streams: Sequence[LeftOutStream],
    config: OutOfFoldConfig,
    seed: int,
    progress: Progress,
    stop: StopRequest | None = None,
) -> Chosen:
    """Fit phi, try every candidate, fit phi again in the loop of the best one, and decide who predicts."""
    baselines = _grid(config.baselines, ("batch", "stream"), config.step_sizes, {})
    progress.start("choose", len(_candidates(config)) + len(baselines) + 2)
    still = _still_lessons(streams)
    anchor_phi, doubt = fit_phi(still, config, seed), _doubt(still) if config.heed_doubt else None
    progress.advance(1, {})
    ready = _labelled(streams, still, config, seed) if "anchored" in config.updates else streams
    tried: list[tuple[Row, list[Played]]] = []
    for settings in _candidates(config, doubt):
        _heed(stop)
        row, plays = _try_rule(settings, ready, config.calibrate)
        tried.append((row, plays))
        progress.advance(1 + len(tried), {"accuracy": row.accuracy})
    own = safest([row for row, _ in tried], config.tolerance, config.near)
    plays = next(seen for row, seen in tried if row is own)
    told = _told(own, streams, plays, still, config, seed)
    final, outputs = _predictor(told, config)
    sure = None
    if config.calibrate and config.agreement and final.update != "none":
        sure = _sureness(streams, outputs, still)
    predict_phi = fit_phi([played.lesson for played in plays], config, seed)
    progress.advance(2 + len(tried), {"accuracy": final.accuracy})
    others: list[Row] = []
    for method, options in baselines:
        _heed(stop)
        others.append(_try_baseline(method, options, streams, config.calibrate))
        progress.advance(2 + len(tried) + len(others), {"accuracy": others[-1].accuracy})
    others = _marked(others, config.near)
    table = [_decided(row, sure) if row is final else row for row, _ in [*tried, *told[1:]]]
    methods = _collect(final, doubt, sure, others, config)
    return Chosen(anchor_phi, predict_phi, methods, table + others)


def _try_rule(
    settings: VnlSettings, streams: Sequence[LeftOutStream], calibrate: bool
) -> tuple[Row, list[Played]]:
    plays = play_all(partial(Vnl, settings=settings), streams)
    scores = _scores(streams, [played.probabilities for played in plays], calibrate)
    return _row("vnl", settings.update, settings, scores), plays


def _predictor(told: Sequence[tuple[Row, list[Tensor]]], config: OutOfFoldConfig) -> tuple[Row, list[Tensor]]:
    """Return who predicts, of those who are asked, and what they say."""
    final = surest([row for row, _ in told if row.predict in config.predictors], config.tolerance)
    return next(one for one in told if one[0] is final)


def _told(
    own: Row,
    streams: Sequence[LeftOutStream],
    plays: Sequence[Played],
    still: Sequence[Lesson],
    config: OutOfFoldConfig,
    seed: int,
) -> list[tuple[Row, list[Tensor]]]:
    """Return how everyone does who may predict after the updates of a rule, with what they say; own first."""
    after = After([played.lesson for played in plays], still, [stream.domain for stream in streams])
    made = [(own, [played.probabilities for played in plays])]
    for name in config.predictors:
        if name in PREDICTORS:
            outputs = PREDICTORS[name](after, config, seed)
            scores = _scores(streams, outputs, config.calibrate)
            made.append((replace(own, predict=name, **scores._asdict()), outputs))
    return made


def _sureness(
    streams: Sequence[LeftOutStream], outputs: Sequence[Tensor], still: Sequence[Lesson]
) -> Sureness:
    """Return how sure outputs may be, by temperature or by agreement with models that are not updated."""
    told = [
        Told(stream.domain, p.view(*lesson.y.shape, -1), lesson.logits.argmax(-1), lesson.y)
        for stream, p, lesson in zip(streams, outputs, still, strict=True)
    ]
    return fitted_sureness(told, VnlSettings())


def try_step_sizes(
    streams: Sequence[LeftOutStream],
    method: str,
    scales: Sequence[float],
    near: float,
    kinds: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
    calibrate: bool = False,
) -> list[Row]:
    """Return how a method did with each multiple of its own paper's step size, the surest of a kind chosen.

    Each is tried on all left-out streams, on the kinds of statistics given; by default on the method's own
    and on those of the stream. `given` holds other options that the method will run with; `calibrate` fits a
    temperature to each.
    """
    own = METHODS[method].defaults
    kinds = kinds or tuple(dict.fromkeys((own.statistics.kind, "stream")))
    grid = _grid((method,), kinds, [own.lr * scale for scale in scales], given or {})
    return _marked([_try_baseline(name, settings, streams, calibrate) for name, settings in grid], near)


def _heed(stop: StopRequest | None) -> None:
    if stop is not None and stop.asked:
        raise StoppedError("stopped while choosing the rule; all models are on disk: go on with --resume")


def safest(rows: Sequence[Row], tolerance: float, near: float) -> Row:
    """Return, of the updates that are level with the most accurate one, the surest rule of the safest.

    No update cannot drift; the anchor's shares and labels hold the model to the source; entropy alone is held
    by nothing. Shares before labels: on long streams they hold as well and are less in the way. An anchor's
    before neighbors: these follow the model where it goes.
    """
    update = min((row.update for row in _level(rows, tolerance)), key=UPDATES.index)
    return surest([row for row in rows if row.update == update], near)


def surest(rows: Sequence[Row], near: float) -> Row:
    """Return, of the rules whose accuracy is near the best, the one of the lowest NLL; the first if level.

    A step that is too long makes mistakes that a model is sure of: on a short stream they cost likelihood
    before they cost accuracy, and a long one builds on them.
    """
    return min(_level(rows, near), key=lambda row: row.nll if math.isfinite(row.nll) else math.inf)


def _level(rows: Sequence[Row], tolerance: float) -> list[Row]:
    """Return the rows whose accuracy is level with the best: left-out streams are few, less is noise."""
    best = max(row.accuracy for row in rows)
    return [row for row in rows if row.accuracy >= best - tolerance]


def _still_lessons(streams: Sequence[LeftOutStream]) -> list[Lesson]:
    """Return what left-out models saw that are not updated: what an anchor is."""
    still = VnlSettings(update="none", predict="own")
    return [played.lesson for played in play_all(partial(Vnl, settings=still), streams)]


def _doubt(lessons: Sequence[Lesson]) -> float:
    """Return how much models doubt their predictions, u_0 of `doubt_share`, each stream counting the same."""
    s = [mean_square(sharpened(lesson.logits.flatten(0, 1))) for lesson in lessons]
    return max(0.0, 1 - float(sum(s)) / len(s))  # sure to the last digit, rounding makes it less


def _labelled(
    streams: Sequence[LeftOutStream], still: Sequence[Lesson], config: OutOfFoldConfig, seed: int
) -> list[LeftOutStream]:
    """Return the streams, the model of each with a phi for its anchor that saw nothing of its domain."""
    phis = fitted_without([stream.domain for stream in streams], still, config, seed)
    owners = {
        (id(stream.trained), stream.domain): replace(stream.trained, anchor_phi=phis[stream.domain])
        for stream in streams
    }
    return [replace(stream, trained=owners[id(stream.trained), stream.domain]) for stream in streams]


def _grid(
    methods: Sequence[str], kinds: Sequence[str], sizes: Sequence[float], given: Mapping[str, Any]
) -> list[tuple[str, Settings]]:
    return [
        (name, configure(METHODS[name].defaults, {"statistics": kind, **given, "lr": lr}))
        for name, kind, lr in product(methods, kinds, sizes)
    ]


def _try_baseline(method: str, settings: Settings, streams: Sequence[LeftOutStream], calibrate: bool) -> Row:
    outputs = predict_all(partial(METHODS[method].build, settings=settings), streams)
    return _row(method, method, settings, _scores(streams, outputs, calibrate))


def _collect(
    final: Row, doubt: float | None, sure: Sureness | None, others: Sequence[Row], config: OutOfFoldConfig
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the options of every method by kind of statistics: the rule of vnl, step sizes of others."""
    rule = {"update": final.update, "lr": final.lr, "from_rest": final.from_rest, "predict": final.predict}
    rule |= {"doubt": doubt}
    rule |= VOTES[config.votes] if "neighbors" in (final.update, final.predict) else {}
    methods: dict[str, dict[str, dict[str, Any]]] = {"vnl": dict.fromkeys(KINDS, rule)}
    how_sure = tempered_by(final.temperature) if sure is None else sure.options
    methods["vnl"][final.statistics] = rule | how_sure  # of no other kind is it known
    for row in others:
        if row.chosen:
            methods.setdefault(row.method, {})[row.statistics] = {
                "lr": row.lr,
                **tempered_by(row.temperature),
            }
    return methods


def _decided(row: Row, sure: Sureness | None) -> Row:
    """Return the row of the rule chosen, with the temperature that goes with it."""
    if sure is None:
        return replace(row, chosen=True)
    # The one that is kept: of later halves of the streams, and none where agreement says how sure it is.
    temperature = sure.options.get("output_temperature", 1.0)
    return replace(row, chosen=True, temperature=temperature, sureness=sure._asdict())


def _marked(rows: Sequence[Row], near: float) -> list[Row]:
    """Return the rows, the surest of each method and kind of statistics chosen."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.method, row.statistics), []).append(row)
    best = {key: surest(group, near) for key, group in groups.items()}
    return [replace(row, chosen=row is best[row.method, row.statistics]) for row in rows]


def _candidates(config: OutOfFoldConfig, doubt: float | None = None) -> list[VnlSettings]:
    own = partial(VnlSettings, predict="own", doubt=doubt, **VOTES[config.votes])
    made = [own(update="none")] if "none" in config.updates else []
    for update, rests, lr in product(config.updates, config.from_rest, config.step_sizes):
        if update != "none":
            made.append(own(update=update, from_rest=rests, lr=lr))
    return made


def _row(method: str, update: str, settings: Settings, scores: Scores) -> Row:
    return Row(
        method=method,
        update=update,
        lr=settings.lr,
        from_rest=settings.from_rest,
        statistics=settings.statistics.kind,
        predict=settings.predict,
        **scores._asdict(),
    )


def _scores(streams: Sequence[LeftOutStream], probabilities: Sequence[Tensor], calibrate: bool) -> Scores:
    """Return means over the streams, each stream counting the same, and the temperature if asked."""
    accuracies, nlls = [], []
    for stream, p in zip(streams, probabilities, strict=True):
        y = stream.labels.to(p.device)
        accuracies.append(float((p.argmax(-1) == y).float().mean()))
        nlls.append(float(label_cross_entropy(p, y)))
    count = len(accuracies)
    scores = Scores(sum(accuracies) / count, sum(nlls) / count, min(accuracies))
    if not calibrate:
        return scores
    return scores._replace(temperature=fitted_temperature(probabilities, [one.labels for one in streams]))
