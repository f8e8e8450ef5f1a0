"""Goals against records made by hand."""

from typing import Any

import pytest

from vicinal.benchmarks.bench.goals import (
    ANCHORED,
    COMPILED,
    ERM,
    FIRST,
    GOALS,
    LOOP,
    PLAIN,
    PLAIN_COMPILED,
    PLAIN_EAGER,
    SECOND,
    STREAM,
    TENT,
    VNL,
    Judged,
    fastest,
    judge,
)
from vicinal.benchmarks.bench.records import BenchRecord


def record(group: str, name: str, *rounds: float, part: str = "goals", **told: Any) -> BenchRecord:
    facts: dict[str, Any] = {"scale": "full", "judged": True, "device": "GPU", "shape": {}, "images": 140}
    return BenchRecord(part, group, name, **{**facts, **told}, rounds=rounds)


def verdict(records: list[BenchRecord], group: str, subject: str) -> Judged:
    (found,) = [item for item in judge(records) if (item.goal.group, item.goal.subject) == (group, subject)]
    return found


def test_the_goals_are_those_that_were_set() -> None:
    limits = {(goal.group, goal.subject): (goal.limit, goal.against) for goal in GOALS}
    assert limits == {
        ("training", ERM): (1.0, PLAIN_EAGER),
        ("training", ERM + COMPILED): (1.0, PLAIN),
        ("training", FIRST): (2.0, (ERM,)),
        ("training", SECOND): (2.0, (FIRST,)),
        ("deeper", SECOND): (2.0, (FIRST,)),
        ("loop", LOOP): (360.0, ()),
        ("stream", STREAM): (10.0, ()),
        ("adaptation", VNL): (1.3, (TENT,)),
        ("adaptation", ANCHORED): (1.6, (TENT,)),
    }


@pytest.mark.parametrize(("first", "expected"), [(2.0, "met"), (1.4, "met"), (2.1, "missed")])
def test_a_ratio_is_met_up_to_its_limit(first: float, expected: str) -> None:
    found = verdict(
        [record("training", ERM, 1.0, 1.0), record("training", FIRST, first, first)], "training", FIRST
    )
    assert (found.verdict, found.figure, found.against) == (expected, pytest.approx(first), ERM)


def test_a_ratio_is_taken_round_by_round() -> None:
    records = [record("training", ERM, 1.0, 2.0, 6.0), record("training", FIRST, 1.0, 10.0, 6.0)]
    assert verdict(records, "training", FIRST).figure == 1.0


def plain(*seconds: float) -> list[BenchRecord]:
    return [record("training", name, taken) for name, taken in zip(PLAIN, seconds, strict=True)]


def test_the_best_plain_loop_counts_like_for_like() -> None:
    own = [record("training", ERM, 2.2), record("training", ERM + COMPILED, 1.2)]
    records = [*plain(3.0, 2.5, 2.0, 1.8, 1.5, 1.6), *own]
    found = verdict(records, "training", ERM)  # no compiler on either side
    assert (found.against, found.verdict, found.why) == (PLAIN_EAGER[2], "missed", "")
    assert found.figure == pytest.approx(1.1)
    found = verdict(records, "training", ERM + COMPILED)
    assert (found.against, found.verdict, found.why) == (PLAIN_COMPILED[1], "met", "")
    assert found.figure == pytest.approx(0.8)


def test_a_compiled_step_is_held_against_loops_without_a_compiler_too() -> None:
    records = [*plain(3.0, 2.5, 1.0, 1.8, 1.5, 1.6), record("training", ERM + COMPILED, 1.2)]
    found = verdict(records, "training", ERM + COMPILED)
    assert (found.against, found.verdict) == (PLAIN_EAGER[2], "missed")


def test_a_plain_loop_that_failed_or_is_missing_is_named() -> None:
    records = [record("training", PLAIN[0], 3.0), record("training", PLAIN[2], error="no graph")]
    found = verdict([*records, record("training", ERM, 2.0)], "training", ERM)
    assert (found.against, found.verdict) == (PLAIN[0], "met")
    assert found.why == f"not held against {PLAIN[1]}; {PLAIN[2]} (no times here)"


def test_the_spread_of_the_rounds_comes_with_the_ratio() -> None:
    records = [record("training", ERM, 1.0, 2.0, 4.0), record("training", FIRST, 1.5, 3.2, 5.2)]
    found = verdict(records, "training", FIRST)
    assert found.figure == pytest.approx(1.5)
    assert found.spread == pytest.approx((1.3, 1.6))
    one = verdict([record("training", ERM, 1.0), record("training", FIRST, 1.5)], "training", FIRST)
    assert one.spread is None
    assert verdict([record("loop", LOOP, 10.0)], "loop", LOOP).spread is None


@pytest.mark.parametrize(("seconds", "expected"), [(359.0, "met"), (361.0, "missed")])
def test_a_time_is_judged_by_itself(seconds: float, expected: str) -> None:
    found = verdict([record("loop", LOOP, seconds)], "loop", LOOP)
    assert (found.verdict, found.figure) == (expected, seconds)


def test_other_sizes_give_a_figure_and_no_verdict() -> None:
    records = [record("training", ERM, 1.0, judged=False), record("training", FIRST, 1.5, judged=False)]
    found = verdict(records, "training", FIRST)
    assert (found.verdict, found.figure) == ("not judged", 1.5)


def test_what_is_missing_or_failed_is_said() -> None:
    assert verdict([], "loop", LOOP).verdict == "not measured"
    failed = verdict([record("loop", LOOP, error="out of memory")], "loop", LOOP)
    assert (failed.verdict, failed.why) == ("not measured", "out of memory")
    alone = verdict([record("training", FIRST, 1.0)], "training", FIRST)
    assert alone.verdict == "not measured"
    assert ERM in alone.why


def test_records_of_other_parts_and_groups_do_not_count() -> None:
    records = [
        record("deeper", FIRST, 1.0),
        record("deeper", SECOND, 1.5),
        record("training", FIRST, 1.0, part="growth"),
        record("training", SECOND, 9.0, part="growth"),
    ]
    assert verdict(records, "deeper", SECOND).figure == 1.5
    assert verdict(records, "training", SECOND).verdict == "not measured"


def test_the_fastest_is_by_median() -> None:
    assert fastest([record("g", "a", 1.0, 9.0, 9.0), record("g", "b", 2.0, 2.0, 50.0)]).name == "b"  # type: ignore[union-attr]
    assert fastest([record("g", "a")]) is None
