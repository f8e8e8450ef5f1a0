"""One line for each thing measured, with all that its figures depend on."""

import json
import os
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from vicinal.benchmarks.bench.scale import Shape
from vicinal.errors import ConfigError, DataError
from vicinal.fields import fits

PARTS = ("goals", "profile", "growth")
SECTIONS = ("training", "deeper", "adaptation", "loop", "stream")  # of the goals, measured apart
FILE = "records.jsonl"


@dataclass(frozen=True)
class BenchRecord:
    """What was measured of one case; `error` says why nothing was."""

    part: str  # goals, profile or growth
    group: str  # cases of a group were measured in turn, so that their ratios mean something
    name: str
    scale: str
    judged: bool  # whether goals speak of this size
    device: str
    shape: dict[str, Any]  # backbone, size, batch, stream_batch, classes, domains
    images: int  # of one step, or of the whole stream
    parameters: int = 0
    rounds: tuple[float, ...] = ()  # seconds of a step in each round
    repeats: int = 0  # steps a round
    precision: str = ""  # of most of the arithmetic
    peak_bytes: int | None = None
    flops: int | None = None
    bytes: int | None = None
    floor_arithmetic: float | None = None  # seconds
    floor_memory: float | None = None
    error: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float | None:
        """Seconds of a step: the median over rounds."""
        return statistics.median(self.rounds) if self.rounds else None

    @property
    def floor(self) -> float | None:
        """An estimate from below of the seconds of a step."""
        if self.floor_arithmetic is None or self.floor_memory is None:
            return None
        return max(self.floor_arithmetic, self.floor_memory)


def as_line(record: BenchRecord) -> str:
    """Return a record as a line of JSON, its median with it for readers without Python."""
    return json.dumps({**asdict(record), "seconds": record.seconds}, sort_keys=True)


def from_line(line: str | bytes) -> BenchRecord:
    """Return the record that a line holds; a ValueError says why it holds none."""
    held = json.loads(line)
    if not isinstance(held, dict):
        raise ValueError("no object")
    for item in fields(BenchRecord):
        needed = item.default is MISSING and item.default_factory is MISSING
        if item.name in held and not fits(held[item.name], item.type):
            raise ValueError(f"{item.name} is {held[item.name]!r}")
        if item.name not in held and needed:
            raise ValueError(f"no {item.name}")
    known = {item.name for item in fields(BenchRecord)}
    plain = {name: value for name, value in held.items() if name in known}
    record = BenchRecord(**{**plain, "rounds": tuple(plain.get("rounds", ()))})
    _check_inside(record)
    return record


def _check_inside(record: BenchRecord) -> None:
    """Raise a ValueError where something is missing that every table of records reads."""
    missing = {item.name for item in fields(Shape)} - record.shape.keys()
    if record.part == "profile" and not record.error:
        missing |= {"total", "kinds"} - record.extra.keys()
    if missing:
        raise ValueError(f"no {', '.join(sorted(missing))}")
    if record.part not in PARTS:
        raise ValueError(f"part is {record.part!r}")


def _unheard(text: str) -> None:
    """Tell nobody."""


def read_bench(folder: Path, warn: Callable[[str], None] = _unheard) -> list[BenchRecord]:
    """Return the records of a folder; none where there is no file.

    A last line that is cut off, as a killed run leaves one, is left out and `warn` is told.
    """
    path = folder / FILE
    if folder.is_file():
        raise DataError(f"{folder} is a file: --out takes a folder")
    if not path.exists():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    records = [_record_at(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rest.strip():
        return records
    if _cut_off(rest):
        warn(f"{path}:{len(lines) + 1} is cut off: left out")
        return records
    return [*records, _record_at(path, len(lines) + 1, rest)]


def _cut_off(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _record_at(path: Path, number: int, line: bytes) -> BenchRecord:
    try:
        return from_line(line)
    except ValueError as error:
        raise DataError(f"{path}:{number} is no record of vicinal bench ({error}): delete it") from None


def asked(part: str, group: str, names: Collection[str]) -> bool:
    """Say whether a record is among those asked for, by its part or by its section of the goals."""
    return part in names or (part == "goals" and group in names)


class Place(NamedTuple):
    """Where and how large a run is: records that differ in it do not go into one folder."""

    device: str
    scale: str
    torch: str

    def __str__(self) -> str:
        return f"{self.device}, {self.scale}, torch {self.torch}"


def place_of(record: BenchRecord) -> Place:
    """Return where a record was made."""
    return Place(record.device, record.scale, record.versions.get("torch", "unknown"))


class Ledger:
    """The file of a run: new records of a group take the place of its old ones once they are complete."""

    def __init__(
        self, folder: Path, parts: Collection[str], place: Place, warn: Callable[[str], None] = _unheard
    ) -> None:
        self._path = folder / FILE
        self._parts = parts
        self._made: set[tuple[str, str]] = set()
        self.records = read_bench(folder, warn)
        other = next((place_of(one) for one in self.records if place_of(one) != place), None)
        if other is not None:
            raise ConfigError(
                f"{folder} holds records of another run ({other}; this is {place}): choose another --out"
            )
        folder.mkdir(parents=True, exist_ok=True)

    def replace(self, group: Sequence[BenchRecord]) -> None:
        """Put a finished group where its old records are, on disk too."""
        names = {(record.part, record.group) for record in group}
        at = [index for index, one in enumerate(self.records) if (one.part, one.group) in names]
        rest = [one for one in self.records if (one.part, one.group) not in names]
        start = at[0] if at else len(rest)  # none of the group is before the first of it
        self._made |= names
        self._write([*rest[:start], *group, *rest[start:]])

    def finish(self) -> None:
        """Drop old records of what was asked for and is not measured any more."""
        kept = [
            one
            for one in self.records
            if (one.part, one.group) in self._made or not asked(one.part, one.group, self._parts)
        ]
        if kept != self.records:
            self._write(kept)

    def _write(self, records: list[BenchRecord]) -> None:
        """Write the file whole or not at all: a run that is killed leaves what was there before."""
        unfinished = self._path.with_name(f".{FILE}.{os.getpid()}.tmp")
        try:
            unfinished.write_text("".join(as_line(one) + "\n" for one in records), encoding="utf-8")
            unfinished.replace(self._path)
        finally:
            unfinished.unlink(missing_ok=True)
        self.records = records
