"""Whether a spec holds together: names that exist, options that are taken, figures that belong somewhere."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.methods import METHODS, configure
from vicinal.benchmarks.metric import METRICS
from vicinal.benchmarks.options import real_options
from vicinal.benchmarks.prepare import TrainRequest, settle
from vicinal.data.catalog import DATASETS
from vicinal.data.entries import DatasetEntry
from vicinal.data.load import with_options
from vicinal.data.streams import StreamSpec
from vicinal.errors import ConfigError, UnknownNameError, VicinalError
from vicinal.training import algorithms  # noqa: F401  fills the registry
from vicinal.training.config import OutOfFoldConfig, TrainConfig
from vicinal.training.learner import ALGORITHMS

if TYPE_CHECKING:
    from vicinal.benchmarks.spec import Expect, Figure, Row, Setting, Spec

EACH = (("each",),)  # leave one domain out, for every domain of the catalog entry
UNKNOWN_DOMAINS = 'targets "each" needs the domains of the catalog: name them instead'


def check_spec(spec: "Spec", where: str) -> None:
    """Raise one ConfigError, with file and key, for the first thing that does not hold together."""
    with _at(where):
        _known("metric", spec.metric, METRICS)
        if spec.seeds < 1:
            raise ConfigError(f"seeds must be at least 1, not {spec.seeds}")
        if not spec.settings or not spec.rows:
            raise ConfigError("a spec needs settings and rows")
        _unique("setting", [setting.name for setting in spec.settings])
        _unique("row", [row.label for row in spec.rows])
    for setting in spec.settings:
        with _at(f"{where}: setting '{setting.name}'"):
            _check_setting(setting)
    for row in spec.rows:
        with _at(f"{where}: row '{row.label}'"):
            _check_row(row, spec)
    for number, figure in enumerate(spec.figures, start=1):
        with _at(f"{where}: figures[{number}]"):
            _check_figure(figure, spec)
    for number, expect in enumerate(spec.expects, start=1):
        with _at(f"{where}: expects[{number}]"):
            _check_expect(expect, spec)


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Say where in the file an error belongs."""
    try:
        yield
    except (VicinalError, TypeError) as error:  # TypeError: a dataclass given a field it does not have
        raise ConfigError(f"{where}: {error}") from None


def _known(kind: str, name: str, names: Iterable[str]) -> None:
    names = list(names)
    if name not in names:
        raise UnknownNameError(kind, name, names)


def _unique(kind: str, names: Sequence[str]) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"{kind} '{twice[0]}' stands there twice")


def is_path(data: str) -> bool:
    """Say whether data are one's own: they are here, or what names them can only be a path.

    Nobody needs the data themselves to read a table of their records.
    """
    return data.startswith(".") or any(sign in data for sign in "/\\") or Path(data).exists()


def _check_setting(setting: "Setting") -> None:
    if setting.metric is not None:
        _known("metric", setting.metric, METRICS)
    entry = DATASETS[setting.data] if setting.data in DATASETS else None  # noqa: SIM401
    if entry is None and not is_path(setting.data):
        DATASETS[setting.data]
    if entry is not None:
        with_options(entry, setting.data_options)
        _check_domains(setting, entry)
    elif setting.targets == EACH:
        raise ConfigError(UNKNOWN_DOMAINS)
    joint = StreamSpec(setting.stream, setting.batch_size, setting.alpha).joint
    if setting.batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {setting.batch_size}")
    if joint and any(len(group) < 2 for group in setting.targets):
        raise ConfigError(f"a {setting.stream} stream needs two targets or more in every group")
    settle(TrainRequest(setting.data, (), setting.backbone, setting.weights, setting.size))
    for extra in ({}, setting.quick):
        _fields("training", TrainConfig, {**setting.training, **extra.get("training", {})})
        folds = extra.get("out_of_fold", {})
        if setting.out_of_fold is not None and folds is not None:
            _fields("out_of_fold", OutOfFoldConfig, {**setting.out_of_fold, **folds})


def _fields(name: str, kind: type[Any], values: Mapping[str, Any]) -> None:
    known = {item.name for item in dataclasses.fields(kind)} - {"seed", "algorithm"}
    for key in values:
        if key not in known:
            raise UnknownNameError(f"key of {name}", key, known)
    kind(**real_options(values))


def _check_domains(setting: "Setting", entry: DatasetEntry) -> None:
    domains = domains_of(entry, setting.data_options)
    if domains is None:
        if setting.targets == EACH:
            raise ConfigError(UNKNOWN_DOMAINS)
        return
    if setting.targets != EACH:
        for group in setting.targets:
            for name in (*group, *setting.sources):
                _known("domain", name, domains)
            both = [name for name in group if name in setting.sources]
            if both or not group:
                raise ConfigError(
                    f"'{both[0]}' is a target and a source" if both else "a group of targets is empty"
                )
    elif setting.sources:
        raise ConfigError('targets "each" and sources exclude each other')


def domains_of(entry: DatasetEntry, options: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the domains of a data set; None where its options decide them (angles, corruptions)."""
    decided = [name for name in options if isinstance(getattr(entry.options, name, None), tuple)]
    return None if decided else entry.domains


def _check_row(row: "Row", spec: "Spec") -> None:
    for name in row.settings:
        _known("setting", name, [setting.name for setting in spec.settings])
    if row.method is None:
        if row.options:
            raise ConfigError("options without a method")
        return
    ALGORITHMS[row.algorithm]
    options = real_options(row.options)
    if "seed" in options:
        raise ConfigError("the seed is the benchmark's, not an option")
    configure(METHODS[row.method].defaults, options)


def _check_figure(figure: "Figure", spec: "Spec") -> None:
    _known("row", figure.row, [row.label for row in spec.rows])
    _known("setting", figure.setting, [setting.name for setting in spec.settings])
    _check_target(figure.target, spec.setting(figure.setting))


def _check_target(target: str | None, setting: "Setting") -> None:
    named = {name for group in setting.targets for name in group}
    if setting.data in DATASETS and (not named or setting.targets == EACH):
        entry = DATASETS[setting.data]
        named = set(entry.domains if named else entry.default_targets)
    if target is not None and named:
        _known("target", target, named)


def _check_expect(expect: "Expect", spec: "Spec") -> None:
    bounds = (expect.at_least, expect.above, expect.at_most, expect.below)
    if sum(bound is not None for bound in bounds) != 1:
        raise ConfigError("give one of at_least, above, at_most and below")
    _known("setting", expect.setting, [setting.name for setting in spec.settings])
    measured = [row.label for row in spec.rows_of(spec.setting(expect.setting))]
    for label in (expect.row, expect.above, expect.below):
        if label is not None:
            _known(f"row measured in '{expect.setting}'", label, measured)
    _check_target(expect.target, spec.setting(expect.setting))
