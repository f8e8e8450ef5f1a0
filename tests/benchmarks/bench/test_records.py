"""Records through their file, and a file that is never another machine's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vicinal.benchmarks.bench.records import FILE, BenchRecord, Ledger, as_line, from_line, read_bench
from vicinal.errors import ConfigError


def made(
    part: str = "goals", name: str = "a", device: str = "GPU", rounds: tuple[float, ...] = (3.0, 1.0, 2.0)
) -> BenchRecord:
    shape = {"backbone": "small", "size": 16}
    return BenchRecord(part, "g", name, "full", True, device, shape, 140, rounds=rounds, extra={"note": "n"})


def test_a_line_holds_the_whole_record_and_its_median() -> None:
    record = made()
    assert from_line(as_line(record)) == record
    assert json.loads(as_line(record))["seconds"] == 2.0


def test_a_case_that_failed_has_no_time() -> None:
    assert made(rounds=()).seconds is None


@pytest.mark.parametrize(
    ("arithmetic", "memory", "floor"), [(2.0, 1.0, 2.0), (1.0, 3.0, 3.0), (None, 1.0, None)]
)
def test_the_floor_is_the_larger_of_two(arithmetic: float | None, memory: float, floor: float | None) -> None:
    record = BenchRecord(
        "goals", "g", "a", "full", True, "GPU", {}, 1, floor_arithmetic=arithmetic, floor_memory=memory
    )
    assert record.floor == floor


def test_records_are_there_as_soon_as_they_are_made(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "new", ("goals",), "full", "GPU")
    assert read_bench(tmp_path / "new") == []
    for name in ("a", "b"):
        ledger.add(made(name=name))
        assert read_bench(tmp_path / "new")[-1].name == name
    assert read_bench(tmp_path / "new") == ledger.records


def test_a_part_that_is_run_again_replaces_itself_alone(tmp_path: Path) -> None:
    first = Ledger(tmp_path, ("goals", "growth"), "full", "GPU")
    for part in ("goals", "growth"):
        first.add(made(part, "old"))
    again = Ledger(tmp_path, ("growth",), "full", "GPU")
    again.add(made("growth", "new"))
    assert [(record.part, record.name) for record in read_bench(tmp_path)] == [
        ("goals", "old"),
        ("growth", "new"),
    ]


def test_a_section_of_the_goals_that_is_run_again_replaces_itself_alone(tmp_path: Path) -> None:
    first = Ledger(tmp_path, ("goals", "growth"), "full", "GPU")
    for part, group in (("goals", "training"), ("goals", "adaptation"), ("growth", "adaptation")):
        first.add(replace(made(part, "old"), group=group))
    again = Ledger(tmp_path, ("adaptation",), "full", "GPU")
    again.add(replace(made("goals", "new"), group="adaptation"))
    assert [(record.part, record.group, record.name) for record in read_bench(tmp_path)] == [
        ("goals", "training", "old"),
        ("growth", "adaptation", "old"),
        ("goals", "adaptation", "new"),
    ]


def test_records_of_another_machine_are_not_touched(tmp_path: Path) -> None:
    Ledger(tmp_path, ("goals",), "full", "GPU").add(made())
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ConfigError, match="records of another run"):
        Ledger(tmp_path, ("goals",), "full", "CPU, 1 threads")
    with pytest.raises(ConfigError, match="choose another --out"):
        Ledger(tmp_path, ("goals",), "quick", "GPU")
    assert (tmp_path / FILE).read_bytes() == before


def test_a_folder_without_records_has_none(tmp_path: Path) -> None:
    assert read_bench(tmp_path / "nowhere") == []
