"""The records of a benchmark on disk: append-only, several writers, each result once, every line checked."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from vicinal.benchmarks.plan import key_of
from vicinal.errors import DataError
from vicinal.evaluation.record import Record, append_line, is_record, locked, read_line, read_records

RECORDS = "records.jsonl"
PACKED = "records.jsonl.gz"
FIELDS = ("spec", "setting", "row", "key", "model", "quick", "about")
Result = tuple[str, str]  # key of the measurement, target


class Store:
    """The file `records.jsonl` of a folder. A result is there whole or not at all, and never twice.

    Records that gzip packed are there too; the first new one unpacks them, so that all are in one file.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.packed = folder / RECORDS, folder / PACKED
        self._forget()
        self._unpacked: tuple[tuple[int, int], list[Record]] = (0, 0), []

    def append(self, record: Record) -> bool:
        """Write a record and return True; one whose key and target are there already is ignored: False."""
        result = result_of(record)
        check_record(record, "this record")
        with locked(self.path) as file:
            self._catch_up(file)
            if self.packed.exists():
                self._unpack(file)
            if result in self._done:
                return False
            append_line(file, record)
        return True

    def done(self) -> set[Result]:
        """Return key and target of every record."""
        packed = {result_of(record) for record in self._before()}
        if not self.path.exists():
            self._forget()
            return packed
        with self.path.open("rb", buffering=0) as file:
            self._catch_up(file)
        return self._done | packed

    def records(self) -> list[Record]:
        """Return all records; a line that a writer never finished is none."""
        *complete, tail = (self.path.read_bytes() if self.path.exists() else b"").split(b"\n")
        lines = [*complete, tail] if is_record(tail) else complete
        new = [self._read(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        return list({result_of(record): record for record in (*self._before(), *new)}.values())

    def _before(self) -> list[Record]:
        """Return the packed records, read again only if their file is another."""
        if not self.packed.exists():
            return []
        stat = self.packed.stat()
        if self._unpacked[0] != (stat.st_mtime_ns, stat.st_size):
            found = read_records(self.packed)
            for number, record in enumerate(found, start=1):
                check_record(record, f"{self.packed}, line {number}")
            self._unpacked = (stat.st_mtime_ns, stat.st_size), found
        return self._unpacked[1]

    def _unpack(self, file: BinaryIO) -> None:
        """Move the packed records into the locked file; stopped on the way, the next one goes on."""
        for record in self._before():
            if result_of(record) not in self._done:
                append_line(file, record)
        self._catch_up(file)
        self.packed.unlink()

    def _forget(self) -> None:
        """Know of no line of the file."""
        self._done: set[Result] = set()
        self._bytes = 0  # so much of the file is in `_done`
        self._lines = 0

    def _catch_up(self, file: BinaryIO) -> None:
        """Note the results that were written since the last look; reading all each time would be slow."""
        if file.seek(0, os.SEEK_END) < self._bytes:  # somebody put another file here
            self._forget()
        file.seek(self._bytes)
        *complete, tail = file.read().split(b"\n")
        for line in complete:
            if line.strip():
                self._done.add(result_of(self._read(self._lines + 1, line)))
            self._lines += 1  # only now: a bad line is refused at every look
            self._bytes += len(line) + 1
        if is_record(tail):
            self._done.add(result_of(self._read(self._lines + 1, tail)))

    def _read(self, number: int, line: bytes) -> Record:
        record = read_line(self.path, number, line)
        check_record(record, f"{self.path}, line {number}")
        return record


def result_of(record: Record) -> Result:
    """Return what a record is known by."""
    return benchmark_of(record).get("key", ""), record.target


def benchmark_of(record: Record) -> dict[str, Any]:
    """Return what a record says of the benchmark it belongs to; empty for one that belongs to none."""
    part = record.protocol.get("benchmark", {})
    return part if isinstance(part, dict) else {}


def in_cell(record: Record, spec: str, row: str, setting: str) -> Record:
    """Return a record as that of a cell of a benchmark's table, whichever it was measured for."""
    benchmark = {**benchmark_of(record), "spec": spec, "row": row, "setting": setting}
    return replace(record, protocol={**record.protocol, "benchmark": benchmark})


def check_record(record: Record, where: str) -> None:
    """Raise unless a record's keys are those of its protocol."""
    part = benchmark_of(record)
    missing = [name for name in FIELDS if name not in part]
    if missing:
        raise DataError(f"{where}: not a record of a benchmark (no '{missing[0]}'): use a folder of its own")
    about = part["about"] if isinstance(part["about"], dict) else {}
    said = [about.get(name) for name in ("method", "seed", "stream", "batch_size", "model")]
    is_so = [record.method, record.seed, record.stream, record.batch_size, part["model"]]
    if key_of(about) != part["key"] or said != is_so:
        raise DataError(f"{where}: its key '{part['key']}' does not match its protocol: delete this line")
    if key_of(about.get("training", {})) != part["model"]:
        raise DataError(f"{where}: its model '{part['model']}' does not match its protocol: delete this line")
