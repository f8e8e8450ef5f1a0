"""What a benchmark is: columns and rows of one table of the paper, its figures, and what we expect of ours.

A spec is a TOML file: shipped ones lie in `specs/`, your own anywhere. Reading one loads no data.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from vicinal.benchmarks.check import EACH, check_spec
from vicinal.errors import ConfigError, UnknownNameError

SUFFIX = ".toml"
ACCURACY = "accuracy"


@dataclass(frozen=True)
class Setting:
    """One column of the table: data, model and stream."""

    name: str
    data: str  # a name of the catalog, or the path of own data
    targets: tuple[tuple[str, ...], ...] = ()  # held-out groups, one source model each; empty: the default
    sources: tuple[str, ...] = ()  # source domains; empty: all that are not targets of the group
    data_options: Mapping[str, str] = field(default_factory=dict)
    backbone: str | None = None
    weights: str | None = None
    size: int | None = None  # side of the images in pixels
    mean: tuple[float, ...] | None = None  # normalization, where weights from a file need their own
    std: tuple[float, ...] | None = None
    stream: str = "online"
    batch_size: int = 20
    alpha: float = 0.5  # of a label-shifted stream
    training: Mapping[str, Any] = field(default_factory=dict)  # fields of TrainConfig
    out_of_fold: Mapping[str, Any] | None = field(default_factory=dict)  # None: no left-out models
    quick: Mapping[str, Any] = field(default_factory=dict)  # what --quick puts over the fields above
    metric: str | None = None  # of this column; None: the spec's


@dataclass(frozen=True)
class Row:
    """One line of the table: a test-time method on a source model, or without a method a citation."""

    label: str
    method: str | None = None
    algorithm: str = "erm"
    options: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False  # the paper's own method
    settings: tuple[str, ...] = ()  # only in these columns; empty: in all


@dataclass(frozen=True)
class Figure:
    """A number the paper prints; without a target the mean over the column's targets."""

    row: str
    setting: str
    value: float
    std: float | None = None
    target: str | None = None


@dataclass(frozen=True)
class Expect:
    """What is expected of our mean, give or take a tolerance; one of the four bounds is given."""

    row: str
    setting: str
    at_least: float | None = None
    above: str | None = None  # the label of a row
    at_most: float | None = None  # where less is better
    below: str | None = None  # likewise
    tolerance: float = 0.0
    target: str | None = None  # of one target; without it of the mean over the column's targets


@dataclass(frozen=True)
class Spec:
    """One table: its figures are in the unit of its metric (`vicinal.benchmarks.metric`)."""

    name: str
    title: str
    aliases: tuple[str, ...] = ()  # what else it is called, as table1
    paper: str = ""
    note: str = ""  # in paragraphs, if blank lines part it
    metric: str = ACCURACY
    seeds: int = 5
    one_choice: bool = False  # phi, rule and step sizes that seed 0 came to serve every seed
    settings: tuple[Setting, ...] = ()
    rows: tuple[Row, ...] = ()
    figures: tuple[Figure, ...] = ()
    expects: tuple[Expect, ...] = ()

    @property
    def paragraphs(self) -> tuple[str, ...]:
        """Return the paragraphs of the note."""
        return tuple(part.strip() for part in self.note.split("\n\n") if part.strip())

    def setting(self, name: str) -> Setting:
        """Return the column of that name."""
        return next(setting for setting in self.settings if setting.name == name)

    def row(self, label: str) -> Row:
        """Return the line of that label."""
        return next(row for row in self.rows if row.label == label)

    def metric_of(self, setting: str) -> str:
        """Return what the column of that name is about."""
        return self.setting(setting).metric or self.metric

    def rows_of(self, setting: Setting) -> list[Row]:
        """Return the lines that we measure in a column."""
        return [row for row in self.rows if row.method and (not row.settings or setting.name in row.settings)]


def spec_names() -> list[str]:
    """Return the names of the specs that are shipped."""
    shipped = files("vicinal.benchmarks").joinpath("specs")
    return sorted(item.name.removesuffix(SUFFIX) for item in shipped.iterdir() if item.name.endswith(SUFFIX))


def load_spec(name: str | Path) -> Spec:
    """Return the spec of that name, or in that file; what is wrong with it is one error with file and key."""
    if isinstance(name, Path) or str(name).endswith(SUFFIX):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"{path}: no such spec")
        return _parsed(path.read_bytes(), path.stem, str(path))
    if name in spec_names():
        return _shipped(str(name))
    by_alias = {alias: spec for spec in map(_shipped, spec_names()) for alias in spec.aliases}
    if name not in by_alias:
        raise UnknownNameError("spec", str(name), [*spec_names(), *by_alias])
    return by_alias[str(name)]


def _shipped(name: str) -> Spec:
    text = files("vicinal.benchmarks").joinpath("specs", name + SUFFIX).read_bytes()
    return _parsed(text, name, name + SUFFIX)


def _parsed(text: bytes, name: str, where: str) -> Spec:
    try:
        table = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not TOML ({error})") from None
    spec = _made(Spec, table, where, name=name)
    check_spec(spec, where)
    return spec


T = TypeVar("T")
Reader = Callable[[Any, str], Any]


def _made(kind: type[T], table: Any, where: str, **given: Any) -> T:
    """Return a table of the file as a dataclass, field by field."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: must be a table of keys and values, not {table!r}")
    unknown = [key for key in table if key not in READERS[kind]]
    if unknown:
        raise ConfigError(f"{where}: unknown key '{unknown[0]}': choose from {', '.join(READERS[kind])}")
    needed = [f.name for f in fields(kind) if f.default is f.default_factory is MISSING]  # type: ignore[arg-type]
    missing = [key for key in needed if key not in table and key not in given]
    if missing:
        raise ConfigError(f"{where}: '{missing[0]}' is missing")
    read = {key: READERS[kind][key](value, f"{where}: {key}") for key, value in table.items()}
    return kind(**read, **given)


def _of(kind: type, words: str) -> Reader:
    def read(value: Any, where: str) -> Any:
        # True is an int to Python and to nobody else; a whole number will do where a fraction may stand.
        right = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if not right or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{where} must be {words}, not {value!r}")
        return kind(value)

    return read


def _list(item: Reader) -> Reader:
    def read(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, not {value!r}")
        return tuple(item(one, f"{where}[{number}]") for number, one in enumerate(value, start=1))

    return read


def _tables(kind: type) -> Reader:
    return _list(lambda value, where: _made(kind, value, where))


def _texts_by_name(value: Any, where: str) -> dict[str, str]:
    table: dict[str, Any] = _table(value, where)
    return {name: _text(item, f"{where}.{name}") for name, item in table.items()}


def _out_of_fold(value: Any, where: str) -> dict[str, Any] | None:
    if value is False:
        return None
    read: dict[str, Any] = _table(value, where)
    return read


def _quick(value: Any, where: str) -> dict[str, Any]:
    may = {
        key: read for key, read in READERS[Setting].items() if key not in ("name", "data", "quick", "metric")
    }
    table: dict[str, Any] = _table(value, where)
    for key in table:
        if key not in may:
            raise ConfigError(f"{where}: unknown key '{key}': choose from {', '.join(may)}")
    return {key: may[key](item, f"{where}: {key}") for key, item in table.items()}


def _targets(value: Any, where: str) -> tuple[tuple[str, ...], ...]:
    if value == "each":
        return EACH
    groups: tuple[tuple[str, ...], ...] = _list(_list(_text))(value, where)
    return groups


_text, _whole, _number = _of(str, "text"), _of(int, "a whole number"), _of(float, "a number")
_flag, _table = _of(bool, "true or false"), _of(dict, "a table")

READERS: dict[type, dict[str, Reader]] = {
    Spec: {
        "title": _text,
        "aliases": _list(_text),
        "paper": _text,
        "note": _text,
        "metric": _text,
        "seeds": _whole,
        "one_choice": _flag,
        "settings": _tables(Setting),
        "rows": _tables(Row),
        "figures": _tables(Figure),
        "expects": _tables(Expect),
    },
    Setting: {
        "name": _text,
        "data": _text,
        "targets": _targets,
        "sources": _list(_text),
        "data_options": _texts_by_name,
        "backbone": _text,
        "weights": _text,
        "size": _whole,
        "mean": _list(_number),
        "std": _list(_number),
        "stream": _text,
        "batch_size": _whole,
        "alpha": _number,
        "training": _table,
        "out_of_fold": _out_of_fold,
        "quick": _quick,
        "metric": _text,
    },
    Row: {
        "label": _text,
        "method": _text,
        "algorithm": _text,
        "options": _table,
        "ours": _flag,
        "settings": _list(_text),
    },
    Figure: {"row": _text, "setting": _text, "value": _number, "std": _number, "target": _text},
    Expect: {
        "row": _text,
        "setting": _text,
        "at_least": _number,
        "above": _text,
        "at_most": _number,
        "below": _text,
        "tolerance": _number,
        "target": _text,
    },
}
