"""Which records: found on disk, called by what they say of themselves, filtered."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vicinal.benchmarks.store import PACKED, RECORDS
from vicinal.errors import ConfigError, DataError
from vicinal.evaluation.record import Record, read_records
from vicinal.report.content import flat

FILES = (RECORDS, PACKED)
FIELDS = (
    "dataset",
    "target",
    "backbone",
    "algorithm",
    "method",
    "statistics",
    "predict",
    "stream",
    "seed",
    "batch_size",
)
MODEL = "model.safetensors"
_MAX_VALUES = 40
_MAX_NAMED = 5


def read_all(paths: Sequence[Path]) -> list[Record]:
    """Return the records of files and folders, in their order."""
    files = dict.fromkeys(file for path in paths for file in record_files(path))
    records = [record for file in files for record in read_records(file)]
    if not records:
        raise DataError(f"{', '.join(map(str, paths))}: no records there yet: run an evaluation first")
    return records


def record_files(path: Path) -> list[Path]:
    """Return the files of records a path stands for: itself, the one in a folder, else those further down."""
    if not path.is_dir():
        return [path]
    if any((path / name).is_file() for name in FILES):
        return [_file_in(path)]
    folders = sorted({file.parent for name in FILES for file in path.rglob(name)})
    if not folders:
        raise DataError(f"{path}: neither {' nor '.join(FILES)} in this folder or below: {_held(path)}")
    return [_file_in(folder) for folder in folders]


def _held(folder: Path) -> str:
    """Return what a folder without records holds, and what would make some."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if not names:
        return "it is empty"
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    model = f"; vicinal evaluate {folder} makes records of its model" if MODEL in names else ""
    return f"it holds {', '.join(names[:_MAX_NAMED])}{more}{model}"


def _file_in(folder: Path) -> Path:
    here = [folder / name for name in FILES if (folder / name).is_file()]
    if len(here) > 1:
        # The packed one may be a copy or older runs: only its owner knows.
        raise DataError(f"{folder} holds both {' and '.join(FILES)}: name the file that you mean")
    return here[0]


def facets(record: Record) -> dict[str, Any]:
    """Return all that a record can be called by.

    Its fields; what its benchmark says (spec, setting, row, ...) and its adapter's options (lr, steps, ...)
    by their own names; the rest of its protocol by path, as training.train.iterations. Fields come first
    where two share a name. Lists are texts.
    """
    named: dict[str, Any] = {field: getattr(record, field) for field in FIELDS}
    rest = {key: value for key, value in record.protocol.items() if key not in ("benchmark", "adapter")}
    for part in (record.protocol.get("benchmark") or {}, record.protocol.get("adapter") or {}, rest):
        for name, value in flat(part):
            named.setdefault(name, ",".join(map(str, value)) if isinstance(value, list | tuple) else value)
    return named


def known_names(records: Iterable[Record]) -> list[str]:
    """Return the names that records can be called by, in order of first appearance."""
    return list(dict.fromkeys(name for record in records for name in facets(record)))


def check_names(names: Iterable[str], records: Sequence[Record]) -> None:
    """Raise for the first name that none of the records can be called by, with those they can."""
    known = known_names(records)
    short = [name for name in known if "." not in name]
    paths = [name for name in known if "." in name]
    example = next((name for name in paths if name.startswith("training.train.")), "".join(paths[:1]))
    for name in names:
        if name not in known:
            more = f", or a path of the protocol such as {example}" if paths else ""
            raise ConfigError(f"unknown field '{name}': choose from {', '.join(short)}{more}")


def where(records: Sequence[Record], filters: Mapping[str, Sequence[str]]) -> list[Record]:
    """Return the records that match every filter: name -> texts, one of which must be the value.

    A text with commas is one value if a record has just that value, else several.
    """
    check_names(filters, records)
    kept = list(records)
    for name, texts in filters.items():
        present = list(dict.fromkeys(facets(record).get(name) for record in records))
        wanted = [one for text in texts for one in _values(name, text, present)]
        kept = [record for record in kept if facets(record).get(name) in wanted]
    if not kept:
        asked = " and ".join(f"{name}={','.join(texts)}" for name, texts in filters.items())
        raise ConfigError(f"none of the {len(records)} records has {asked}: ask for less at once")
    return kept


def _values(name: str, text: str, present: Sequence[Any]) -> list[Any]:
    """Return the values of `present` that a filter's text names."""
    whole = [value for value in present if _is(value, text)]
    if whole:
        return whole
    found = []
    for part in (part.strip() for part in text.split(",")):
        same = [value for value in present if _is(value, part)]
        if not same:
            shown = [_text(value) for value in present]
            more = f" and {len(shown) - _MAX_VALUES} more" if len(shown) > _MAX_VALUES else ""
            choices = ", ".join(sorted(shown)[:_MAX_VALUES])
            raise ConfigError(f"no record has {name} '{part}': choose from {choices}{more}")
        found += same
    return found


def _is(value: Any, text: str) -> bool:
    if isinstance(value, float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return _text(value) == text


def _text(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
