"""A tiny run from start to end: every case leaves a record, whatever fails."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vicinal.benchmarks.bench import goals
from vicinal.benchmarks.bench import run as run_module
from vicinal.benchmarks.bench.cases import Case, StreamTime
from vicinal.benchmarks.bench.floor import Count, Rates
from vicinal.benchmarks.bench.records import SECTIONS, BenchRecord, Ledger, Place, read_bench
from vicinal.benchmarks.bench.run import Bench, with_floor
from vicinal.benchmarks.bench.scale import QUICK, Scale, Shape

CPU = torch.device("cpu")
GROWTH = {"classes": (3, 5), "domains": (2, 4)}
TINY = replace(
    QUICK, shape=Shape("small", 8, 4, 4, classes=3), rounds=2, growth=GROWTH, deeper="small_gn", streams=(8,)
)


def run(*parts: str) -> list[BenchRecord]:
    records: list[BenchRecord] = []
    Bench(TINY, CPU, records.extend, lambda said: None).run(parts)
    return records


def test_every_goal_has_its_figure() -> None:
    records = run("goals")
    assert [record.error for record in records if record.error] == []
    told = [item for item in goals.judge(records) if goals.COMPILED not in item.goal.subject]
    assert all(item.figure is not None and item.figure > 0 for item in told)
    assert {item.verdict for item in told} == {"not judged"}
    cases = {(record.group, record.name): record for record in records}
    deeper = cases["deeper", goals.SECOND]
    assert deeper.shape["backbone"] == "small_gn"
    assert len(deeper.rounds) == 2
    first, erm = cases["training", goals.FIRST], cases["training", goals.ERM]
    assert first.images == erm.images == 8
    assert first.flops is not None
    assert erm.flops is not None
    assert first.flops > erm.flops
    stepwise = [record for record in records if record.group in ("training", "deeper", "adaptation")]
    for record in stepwise:
        rate = record.extra["matrix_rate"]
        assert record.floor_arithmetic == pytest.approx(record.flops / rate)  # type: ignore[operator]
        assert record.floor == max(record.floor_arithmetic, record.floor_memory)  # type: ignore[type-var]
    assert {record.versions["torch"] for record in records} == {torch.__version__.partition("+")[0]}


def test_a_stream_is_all_images_of_it_and_says_what_set_up_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    run_times = {"marginal": StreamTime(5.0, 1.0), "entropy": StreamTime(4.0, 0.0)}

    def taken(method: str, scale: Scale, device: torch.device, update: str) -> StreamTime:
        return run_times[update]

    monkeypatch.setattr("vicinal.benchmarks.bench.run.stream_seconds", taken)
    anchored, free = run("stream")
    assert anchored.images == free.images == 9991
    # Four domains instead of the one of 8 images that was run: a set-up each, and the rest by the image.
    assert anchored.seconds == pytest.approx(4 * 1.0 + 4.0 * 9991 / 8)
    assert anchored.extra["set_up_seconds"] == 4.0
    assert "one round, extrapolated from 8 images" in anchored.extra["note"]
    assert "4 s of it set-up and recording" in anchored.extra["note"]
    assert free.seconds == pytest.approx(4.0 * 9991 / 8)


def test_the_loop_says_what_it_is_and_is_not() -> None:
    (loop,) = run("loop")
    assert loop.images == 8
    assert loop.extra["note"].startswith("one round, extrapolated from 20")
    assert loop.extra["note"].endswith("saving to disk is not in it")


def test_groups_come_whole_one_after_another() -> None:
    groups: list[list[tuple[str, str]]] = []

    def keep(records: Sequence[BenchRecord]) -> None:
        groups.append([(record.part, record.group) for record in records])

    Bench(TINY, CPU, keep, lambda said: None).run(("goals", "growth"))
    assert all(len(set(group)) == 1 for group in groups)
    first = [group[0] for group in groups]
    assert len(set(first)) == len(first)
    assert first[:5] == [("goals", section) for section in SECTIONS]


def test_an_interrupted_run_leaves_each_group_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("here", "quick", "2.0")

    def stamp(record: BenchRecord, when: str) -> BenchRecord:
        return replace(record, device="here", versions={"torch": "2.0", "commit": when})

    def into(ledger: Ledger, when: str) -> Bench:
        return Bench(
            TINY,
            CPU,
            lambda records: ledger.replace([stamp(one, when) for one in records]),
            lambda said: None,
        )

    parts = ("training", "adaptation", "loop")
    into(Ledger(tmp_path, parts, place), "old").run(parts)
    before = {(record.group, record.name) for record in read_bench(tmp_path)}
    real = run_module.measure

    def interrupted(cases: Sequence[Case], *rest: Any, **more: Any) -> Any:
        if cases[0].name == "no adaptation":
            raise KeyboardInterrupt
        return real(cases, *rest, **more)

    monkeypatch.setattr(run_module, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        into(Ledger(tmp_path, parts, place), "new").run(parts)
    left = read_bench(tmp_path)
    assert {(record.group, record.name) for record in left} == before
    made = {record.group: record.versions["commit"] for record in left}
    assert made == {"training": "new", "adaptation": "old", "loop": "old"}


def test_what_could_not_be_counted_is_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(case: Case) -> None:
        raise RuntimeError("no rule for it")

    monkeypatch.setattr("vicinal.benchmarks.bench.measure._count_of", fails)
    for record in run("adaptation"):
        assert record.extra == {"uncounted": "RuntimeError: no rule for it"}
        assert record.floor is None
        assert record.rounds


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
