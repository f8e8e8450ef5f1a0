"""From a spec to runs: which source models to train, what to measure on each. Pure: touches no data.

A run is known by its key, a digest of everything its result depends on. Equal keys are one run, within a
spec and between specs.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from vicinal.adapters.methods import METHODS, configure, told
from vicinal.benchmarks.check import EACH, domains_of
from vicinal.benchmarks.compare import Entry
from vicinal.benchmarks.options import real_options
from vicinal.benchmarks.prepare import TrainRequest, settle
from vicinal.benchmarks.spec import Row, Setting, Spec
from vicinal.data.catalog import DATASETS
from vicinal.data.load import with_options
from vicinal.data.streams import StreamSpec
from vicinal.errors import UnknownNameError
from vicinal.training.config import identity

DIGITS = 16  # of a key
# They take no step, or choose their own; memo adapts to each image alone and would take hours to choose for.
FIXED = ("erm", "bn", "labels", "lame", "t3a", "vnl", "single_sample", "memo")
# Of them those that nothing but a temperature can be fitted to.
STEPLESS = ("erm", "bn", "lame", "t3a")
# Their phi is fitted, and their rule chosen, on left-out domains.
OUT_OF_FOLD = ("vnl", "labels")
# What --quick means where a spec does not say.
QUICK: dict[str, dict[str, Any]] = {
    "training": {"iterations": 8},
    "out_of_fold": {"stream_images": 40, "epochs": 2, "step_sizes": [1e-3]},
}
MERGED = ("training", "out_of_fold", "data_options")
About = dict[str, Any]


@dataclass(frozen=True)
class TrainRun:
    """One source model to train."""

    key: str
    request: TrainRequest
    seed: int
    about: About = field(repr=False)  # what the key digests

    @property
    def algorithm(self) -> str:
        """How it is trained."""
        return str(self.request.training["algorithm"])


@dataclass(frozen=True)
class MeasureRun:
    """One method from one source model, over the streams of the targets."""

    key: str
    model: str  # key of its TrainRun
    chooser: str | None  # key of the TrainRun whose phi, rule and step sizes it takes; None: its own model's
    spec: str
    setting: str
    row: str
    entry: Entry
    stream: StreamSpec
    targets: tuple[str, ...]
    seed: int
    quick: bool
    ours: bool  # the paper's own method
    chooses: bool  # whether its step size is chosen on left-out domains
    about: About = field(repr=False)

    @property
    def results(self) -> tuple[str, ...]:
        """The targets of its records: a joint stream has one for all of them."""
        return ("+".join(self.targets),) if self.stream.joint else self.targets


@dataclass(frozen=True)
class Plan:
    """All runs of a spec. Two cells of the table may be one run: then its key stands here twice."""

    trainings: tuple[TrainRun, ...]
    measures: tuple[MeasureRun, ...]


def plan(
    spec: Spec,
    *,
    only: Collection[str] = (),
    seeds: int | None = None,
    quick: bool = False,
    backbone: str | None = None,
    weights: str | None = None,
    iterations: int | None = None,
    done: Collection[tuple[str, str]] = frozenset(),
) -> Plan:
    """Return what is to be trained and measured, less what is done: pairs of key and target.

    `only` names settings, data sets or rows to keep. `backbone` and `iterations` replace those of every
    setting.
    """
    count = seeds or (1 if quick else spec.seeds)
    keep = _kept(spec, only)
    trainings: dict[str, TrainRun] = {}
    measures: list[MeasureRun] = []
    settings = {one.name: _real_setting(one, quick, backbone, weights, iterations) for one in spec.settings}
    for setting in spec.settings:
        real = settings[setting.name]
        rows = [
            row for other in settings.values() if _same_models(other, real) for row in spec.rows_of(other)
        ]
        for seed in range(count):
            for group in groups_of(real):
                models = _models(real, group, rows, seed, spec.one_choice)
                for row in spec.rows_of(setting):
                    if not keep(setting, row):
                        continue
                    trained, chooser = models[served_by(row.algorithm, rows)]
                    run = _measure(spec, real, row, trained, chooser, group, quick)
                    if any((run.key, target) not in done for target in run.results):
                        trainings[trained.key] = trained
                        if run.chooser is not None:
                            trainings[chooser.key] = chooser
                        measures.append(run)
    return Plan(tuple(trainings.values()), tuple(measures))


def key_of(about: About) -> str:
    """Return the key of a run: a digest of its description, the same on every machine."""
    text = json.dumps(about, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return sha256(text.encode()).hexdigest()[:DIGITS]


def served_by(algorithm: str, rows: Sequence[Row]) -> str:
    """Return the training that serves an algorithm: theta of `neighbor` is ERM's, so one does for both."""
    wanted = {row.algorithm for row in rows}
    return "neighbor" if algorithm == "erm" and "neighbor" in wanted else algorithm


def _algorithms(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(served_by(row.algorithm, rows) for row in rows))


def groups_of(setting: Setting) -> tuple[tuple[str, ...], ...]:
    """Return the held-out groups of a column, each of which is one source model."""
    if setting.data not in DATASETS:
        return setting.targets or ((),)
    entry = DATASETS[setting.data]
    if setting.targets == EACH:
        return tuple((name,) for name in entry.domains)
    return setting.targets or (entry.default_targets,)


def _kept(spec: Spec, only: Collection[str]) -> Any:
    """Return a test of (setting, row): words that name columns limit those, words that name rows those.

    A column also goes by its data set. A word that is no row's label names all rows whose source models are
    trained so, or else all rows of a method.
    """
    columns = {name: {s.name for s in spec.settings if name in (s.name, s.data)} for name in only}
    rows = {name: _rows_named(spec.rows, name) for name in only}
    for word in only:
        if not columns[word] and not rows[word]:
            known = {name for s in spec.settings for name in (s.name, s.data)}
            known |= {name for row in spec.rows for name in (row.label, row.algorithm, row.method) if name}
            raise UnknownNameError("setting, data set, row, source training or method", word, known)
    of_columns, of_rows = (set().union(*named.values()) for named in (columns, rows))

    def keep(setting: Setting, row: Row) -> bool:
        return (not of_columns or setting.name in of_columns) and (not of_rows or row.label in of_rows)

    return keep


def _rows_named(rows: Sequence[Row], word: str) -> set[str]:
    """Return the labels of the rows that a word names."""
    named: tuple[set[str], ...] = (
        {row.label for row in rows if row.label == word},
        {row.label for row in rows if row.method is not None and row.algorithm == word},
        {row.label for row in rows if row.method == word},
    )
    return next(filter(None, named), set())


def _real_setting(
    setting: Setting, quick: bool, backbone: str | None, weights: str | None, iterations: int | None
) -> Setting:
    """Return the setting as it is run: made quick, on another backbone, trained for longer or shorter."""
    if quick:
        given = {**QUICK, **setting.quick}
        changes: dict[str, Any] = {name: value for name, value in given.items() if name not in MERGED}
        for name in MERGED:
            old = getattr(setting, name)
            if old is not None and name in given:
                changes[name] = None if given[name] is None else {**old, **given[name]}
        setting = replace(setting, **changes)
    if backbone is not None:
        # Weights from a file, and what they are normalized by, are those of the old backbone.
        kept = setting.weights if setting.weights in (None, "none", "timm") else None
        setting = replace(setting, backbone=backbone, weights=kept, mean=None, std=None)
    if iterations is not None:
        setting = replace(setting, training={**setting.training, "iterations": iterations})
    return setting if weights is None else replace(setting, weights=weights)


def _same_models(one: Setting, other: Setting) -> bool:
    """Return whether two columns differ in nothing that training sees: they then share their models."""
    of_data, of_net = ("data", "data_options", "sources"), ("backbone", "weights", "size", "mean", "std")
    names = (*of_data, *of_net, "training", "out_of_fold")
    held_out = one.sources != () or groups_of(one) == groups_of(other)
    return held_out and all(getattr(one, name) == getattr(other, name) for name in names)


def chooses_step_size(row: Row) -> bool:
    """Return whether the step size of a row is left to the left-out domains."""
    return row.method not in FIXED and "lr" not in row.options


def chooses(row: Row, left_out: Mapping[str, Any] | None) -> bool:
    """Return whether anything of a row is left to the left-out domains by these options of theirs.

    Where temperatures are fitted, that of a method that takes no step is too.
    """
    if left_out is None:
        return False
    fits = bool(left_out.get("calibrate")) and "output_temperature" not in row.options
    return chooses_step_size(row) or (fits and row.method in STEPLESS)


def scales_of(request: TrainRequest, method: str) -> tuple[float, ...]:
    """Return the multiples of its own step size that a method may choose from: a tenth, itself, and vnl's.

    Vnl's are the step sizes it chooses from over its own: from scratch longer ones, from weights shorter.
    """
    if method in FIXED:
        return (1.0,)
    left_out = settle(request).out_of_fold
    sizes = () if left_out is None else left_out.step_sizes
    return tuple(sorted({0.1, 1.0, *(round(size / METHODS["vnl"].defaults.lr, 6) for size in sizes)}))


def _left_out(setting: Setting, rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the out-of-fold options that the rows on one model need; None: no left-out models at all."""
    if setting.out_of_fold is None:
        return None
    fitted = any(row.method in OUT_OF_FOLD for row in rows)
    if not fitted and not any(chooses(row, setting.out_of_fold) for row in rows):
        return None
    # Where nobody uses the rule it need not be chosen: the left-out models are there for step sizes alone.
    rule = {} if fitted else {"updates": ["none"]}
    return {"baselines": [], **rule, **setting.out_of_fold}


def _models(
    setting: Setting, group: tuple[str, ...], rows: Sequence[Row], seed: int, one_choice: bool
) -> dict[str, tuple[TrainRun, TrainRun]]:
    """Return, for every algorithm, the model of a seed and the one that chooses for it, most often itself."""
    models = {}
    for name in _algorithms(rows):
        mine = [row for row in rows if served_by(row.algorithm, rows) == name]
        left_out = _left_out(setting, mine)
        chooser = _training(setting, group, name, left_out, 0 if one_choice else seed)
        model = chooser if chooser.seed == seed else _training(setting, group, name, None, seed)
        models[name] = model, chooser
    return models


def _training(
    setting: Setting, group: tuple[str, ...], algorithm: str, left_out: dict[str, Any] | None, seed: int
) -> TrainRun:
    request = TrainRequest(
        data=setting.data,
        targets=_held_out(setting, group),
        sources=setting.sources,
        backbone=setting.backbone,
        weights=setting.weights,
        size=setting.size,
        mean=setting.mean,
        std=setting.std,
        seed=seed,
        data_options=dict(setting.data_options),
        training={**real_options(setting.training), "algorithm": algorithm},
        out_of_fold=None if left_out is None else real_options(left_out),
    )
    about = about_training(request)
    return TrainRun(key_of(about), request, seed, about)


def _held_out(setting: Setting, group: tuple[str, ...]) -> tuple[str, ...]:
    """Return the domains kept from training.

    With named sources these are all the others, so that columns with other targets share the model.
    """
    entry = DATASETS[setting.data] if setting.data in DATASETS else None  # noqa: SIM401
    domains = None if entry is None else domains_of(entry, setting.data_options)
    if not setting.sources or domains is None:
        return group
    return tuple(name for name in domains if name not in setting.sources)


def about_training(request: TrainRequest) -> About:
    """Return everything a source model depends on, as plain values."""
    settled = settle(request)
    options: Mapping[str, Any] = request.data_options
    if request.data in DATASETS:
        chosen = with_options(DATASETS[request.data], request.data_options)
        options = {} if chosen is None else asdict(chosen)
    return {
        "data": request.data,
        "data_options": dict(options),
        "targets": sorted(request.targets),
        "sources": sorted(request.sources),
        "backbone": settled.backbone,
        "weights": settled.weights if settled.weights in ("none", "timm") else Path(settled.weights).name,
        "preprocessing": asdict(settled.preprocessing),
        "training": identity(settled.config),
        "out_of_fold": None if settled.out_of_fold is None else identity(settled.out_of_fold),
    }


def takes_choices(about: About) -> bool:
    """Return whether a run, by its description, takes a phi or a step size from left-out domains."""
    return about.get("method") in OUT_OF_FOLD or about.get("step_sizes") is not None


def _measure(
    spec: Spec,
    setting: Setting,
    row: Row,
    trained: TrainRun,
    chooser: TrainRun,
    group: tuple[str, ...],
    quick: bool,
) -> MeasureRun:
    assert row.method is not None
    options = real_options(row.options)
    stream = StreamSpec(setting.stream, setting.batch_size, setting.alpha)
    choosing = chooses(row, chooser.request.out_of_fold)
    about: About = {
        "model": trained.key,
        "training": trained.about,
        "targets": list(group) if stream.joint else sorted(group),
        "method": row.method,
        "settings": told(configure(METHODS[row.method].defaults, options)),
        "given": sorted(options),
        "step_sizes": list(scales_of(chooser.request, row.method)) if choosing else None,
        "stream": stream.kind,
        "alpha": stream.alpha if stream.kind == "label_shift" else None,
        "batch_size": stream.batch_size,
        "seed": trained.seed,
    }
    teaches = chooser is not trained and chooser.request.out_of_fold is not None
    borrows = teaches and takes_choices(about)
    if borrows:
        about["chooser"] = chooser.about
    return MeasureRun(
        key=key_of(about),
        model=trained.key,
        chooser=chooser.key if borrows else None,
        spec=spec.name,
        setting=setting.name,
        row=row.label,
        entry=Entry(row.method, options),
        stream=stream,
        targets=group,
        seed=trained.seed,
        quick=quick,
        ours=row.ours,
        chooses=choosing,
        about=about,
    )
