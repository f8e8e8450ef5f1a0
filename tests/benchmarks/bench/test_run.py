"""A tiny run from start to end: every case leaves a record, whatever fails."""

from dataclasses import replace

import pytest
import torch

from vicinal.benchmarks.bench import goals
from vicinal.benchmarks.bench.floor import Count, Rates
from vicinal.benchmarks.bench.records import SECTIONS, BenchRecord
from vicinal.benchmarks.bench.run import Bench, device_name, with_floor
from vicinal.benchmarks.bench.scale import QUICK, Shape

CPU = torch.device("cpu")
GROWTH = {"classes": (3, 5), "domains": (2, 4)}
TINY = replace(
    QUICK, shape=Shape("small", 8, 4, 4, classes=3), rounds=2, growth=GROWTH, deeper="small_gn", streams=(8,)
)


def run(*parts: str) -> list[BenchRecord]:
    records: list[BenchRecord] = []
    Bench(TINY, CPU, records.append, lambda said: None).run(parts)
    return records


def test_every_goal_has_its_figure() -> None:
    records = run("goals")
    assert [record.error for record in records if record.error] == []
    assert all(item.figure is not None and item.figure > 0 for item in goals.judge(records))
    assert {item.verdict for item in goals.judge(records)} == {"not judged"}
    cases = {(record.group, record.name): record for record in records}
    deeper = cases["deeper", goals.SECOND]
    assert deeper.shape["backbone"] == "small_gn"
    assert len(deeper.rounds) == 2
    first, erm = cases["training", goals.FIRST], cases["training", goals.ERM]
    assert first.images == erm.images == 8
    assert first.flops is not None
    assert erm.flops is not None
    assert first.flops > erm.flops
    assert all(r.seconds >= r.floor for r in records if r.floor is not None)  # type: ignore[operator]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_of_the_goals_can_be_run_alone(section: str) -> None:
    records = run(section)
    assert {(record.part, record.group) for record in records} == {("goals", section)}
    assert [record.error for record in records if record.error] == []


def test_growth_has_a_record_for_each_value() -> None:
    records = run("growth")
    assert [record.error for record in records if record.error] == []
    series = {(record.group, record.name) for record in records}
    subjects = (goals.ERM, goals.FIRST, goals.ANCHORED)
    expected = {(f"classes: {subject}", value) for subject in subjects for value in ("3", "5")}
    assert series == expected | {("domains: iteration of the loop", value) for value in ("2", "4")}
    models = [record.extra["left_out_models"] for record in records if record.group.startswith("domains")]
    assert models == [2, 2]


def test_a_profile_that_fails_leaves_a_row_and_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def fails(work: object, device: torch.device) -> None:
        made.append(work)
        raise RuntimeError("no profiler here")

    monkeypatch.setattr("vicinal.benchmarks.bench.run.profiled", fails)
    records = run("profile")
    assert len(made) == 5
    assert [record.error for record in records] == ["RuntimeError: no profiler here"] * 5


def test_a_loop_that_fails_leaves_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr("vicinal.benchmarks.bench.run.loop_marks", fails)
    records = {(record.group, record.name): record for record in run("goals")}
    assert records["loop", goals.LOOP].error == "MemoryError"
    assert records["stream", goals.STREAM].seconds is not None


def test_a_floor_needs_a_rate_of_its_precision() -> None:
    record = BenchRecord("goals", "g", "a", "full", True, "GPU", {}, 1)
    count, rates = Count(flops=100, bytes=30), Rates({"float32": 50.0}, bytes=10.0)
    assert with_floor(record, count, rates, "float32").floor == 3.0
    strange = with_floor(record, count, rates, "float64")
    assert (strange.floor, strange.flops, strange.precision) == (None, 100, "float64")


def test_the_device_is_named() -> None:
    assert device_name(CPU) == f"CPU, {torch.get_num_threads()} threads"
