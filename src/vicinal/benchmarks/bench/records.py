"""One line for each thing measured, with all that its figures depend on."""

import json
import statistics
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from vicinal.errors import ConfigError

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
        """The least seconds a step can take."""
        if self.floor_arithmetic is None or self.floor_memory is None:
            return None
        return max(self.floor_arithmetic, self.floor_memory)


def as_line(record: BenchRecord) -> str:
    """Return a record as a line of JSON, its median with it for readers without Python."""
    return json.dumps({**asdict(record), "seconds": record.seconds}, sort_keys=True)


def from_line(line: str) -> BenchRecord:
    """Return the record that a line holds."""
    held = json.loads(line)
    known = {item.name for item in fields(BenchRecord)}
    plain = {name: value for name, value in held.items() if name in known}
    return BenchRecord(**{**plain, "rounds": tuple(plain["rounds"])})


def read_bench(folder: Path) -> list[BenchRecord]:
    """Return the records of a folder; none where there is no file."""
    path = folder / FILE
    if not path.exists():
        return []
    return [from_line(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def asked(part: str, group: str, names: Collection[str]) -> bool:
    """Say whether a record is among those asked for, by its part or by its section of the goals."""
    return part in names or (part == "goals" and group in names)


class Ledger:
    """The file of a run: earlier records of other parts stay, new ones are appended as they come."""

    def __init__(self, folder: Path, parts: Collection[str], scale: str, device: str) -> None:
        self._path = folder / FILE
        there = read_bench(folder)
        if any((record.scale, record.device) != (scale, device) for record in there):
            held = f"{there[0].device}, {there[0].scale}"
            raise ConfigError(f"{folder} holds records of another run ({held}): choose another --out")
        folder.mkdir(parents=True, exist_ok=True)
        self.records = [record for record in there if not asked(record.part, record.group, parts)]
        self._path.write_text("".join(as_line(record) + "\n" for record in self.records), encoding="utf-8")

    def add(self, record: BenchRecord) -> None:
        """Append a record; a run that is killed keeps what it had."""
        self.records.append(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(as_line(record) + "\n")
