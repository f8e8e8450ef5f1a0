"""One measured result with its whole protocol, and the file of lines that holds many of them."""

import dataclasses
import gzip
import json
import math
import os
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, get_origin, get_type_hints

from vicinal.errors import DataError

if sys.platform != "win32":
    import fcntl


@dataclasses.dataclass(frozen=True)
class Record:
    """One adapter over one stream: who, on what, how well, and how it was done."""

    dataset: str
    target: str
    backbone: str
    algorithm: str
    method: str
    statistics: str
    predict: str
    stream: str
    seed: int
    batch_size: int
    accuracy: float
    ece: float
    nll: float
    brier: float
    curve: list[float]
    seconds: float
    images_per_second: float
    reliability: dict[str, list[float]]
    protocol: dict[str, Any]
    versions: dict[str, str]

    @property
    def model_seed(self) -> int:
        """Return the seed of the source model, the unit of repetition; without one the run's own.

        Several streams drawn for one model are not several repetitions.
        """
        provenance = self.protocol.get("provenance")
        seed = provenance.get("seed") if isinstance(provenance, dict) else None
        return seed if isinstance(seed, int) else self.seed

    def to_json(self) -> str:
        """Return one line of JSON with sorted keys; numbers that are not finite become null."""
        return json.dumps(finite_or_none(dataclasses.asdict(self)), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Record":
        """Return the record a line of `to_json` holds; null among its measurements becomes NaN."""
        try:
            values = json.loads(line)
        except ValueError as error:
            raise DataError(f"not a record: {error}") from None
        if not isinstance(values, dict):
            raise DataError("not a record: a record is a JSON object")
        kinds = get_type_hints(cls)
        if kinds.keys() != values.keys():
            missing, unknown = sorted(kinds.keys() - values.keys()), sorted(values.keys() - kinds.keys())
            raise DataError(f"not a record: missing fields {missing}, unknown fields {unknown}")
        return cls(**{name: _parsed(name, value, kinds[name]) for name, value in values.items()})


def append_record(path: Path, record: Record) -> None:
    """Return once the record is on disk as one more complete line of `path`.

    The line is written by one call and synced. A torn line that an interrupted run left at the end is cut off
    first, since glued to the new line it would spoil both.
    """
    with locked(path) as file:
        if append_line(file, record):
            warnings.warn(f"{path}: removed a torn last line before appending", stacklevel=2)


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file of records for reading and appending, with no other writer at it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        _lock(file)
        yield file


def append_line(file: BinaryIO, record: Record) -> bool:
    """Write the record as one more complete line of a locked file; return whether a torn one was cut off."""
    line = record.to_json().encode() + b"\n"
    tail = unfinished_line(file)
    torn = bool(tail) and not is_record(tail)
    if torn:
        file.truncate(file.seek(0, os.SEEK_END) - len(tail))
    elif tail:
        line = b"\n" + line
    if file.write(line) != len(line):
        where = f"{file.name}: the record was only partly written"
        raise DataError(f"{where}: free some disk space and run again")
    os.fsync(file.fileno())
    return torn


def read_records(path: Path) -> list[Record]:
    """Return the records of a file of lines, also of one that gzip packed (`.gz`).

    A torn last line (no newline at its end and not a record) is skipped with a warning; any other bad line is
    an error that names its number.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file of records: run an evaluation first or check the path")
    *complete, tail = _content(path).split(b"\n")
    records = [read_line(path, n, line) for n, line in enumerate(complete, start=1) if line.strip()]
    if tail.strip():
        if is_record(tail):
            return [*records, read_line(path, len(complete) + 1, tail)]
        warnings.warn(f"{path}: skipped a torn last line (line {len(complete) + 1})", stacklevel=2)
    return records


def _content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        packed = path.read_bytes()
        if not packed:
            raise EOFError("it is empty")
        return gzip.decompress(packed)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file ({error}): pack the records again") from None


def finite_or_none(value: Any) -> Any:
    """Return the value with every float in it that is not finite replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(item) for item in value]
    return value


def _parsed(name: str, value: Any, kind: Any) -> Any:
    """Return one field's value as its declared kind; raises DataError for a value of another kind."""
    if kind is float:
        return _number(name, value)
    if kind == list[float]:
        return [_number(name, item) for item in _expect(name, value, list)]
    if kind == dict[str, list[float]]:
        rows = _expect(name, value, dict)
        return {key: [_number(name, item) for item in _expect(name, row, list)] for key, row in rows.items()}
    return _expect(name, value, get_origin(kind) or kind)


def _number(name: str, value: Any) -> float:
    return math.nan if value is None else float(_expect(name, value, int | float))


def _expect(name: str, value: Any, kind: Any) -> Any:
    # bool is an int to Python; in a record it would be a mistake.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DataError(f"not a record: field '{name}' cannot hold {value!r:.40}")
    return value


def read_line(path: Path, number: int, line: bytes) -> Record:
    """Return the record of one line; one that holds none is an error that names it."""
    try:
        return Record.from_json(line.decode())
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{path}, line {number}: {error}: mend or delete this line") from None


def is_record(line: bytes) -> bool:
    """Return whether a line holds a whole record."""
    try:
        Record.from_json(line.decode())
    except (DataError, UnicodeDecodeError):
        return False
    return True


def _lock(file: BinaryIO) -> None:
    # Without the lock a second writer could take a line that is still being written for a torn one.
    # Closing the file releases it.
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_EX)


def unfinished_line(file: BinaryIO) -> bytes:
    """Return what follows the last newline of the file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    if file.read(1) in (b"", b"\n"):
        return b""
    file.seek(0)
    return file.read().rsplit(b"\n", 1)[-1]
