"""The goals, and what records say of them: a figure each, met or missed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vicinal.benchmarks.bench.records import BenchRecord
from vicinal.benchmarks.bench.timing import ratio, spread

ERM, FIRST, SECOND = "ERM step", "VNL first order", "VNL second order"
COMPILED = ", compiled"  # after the name of a step whose net is
# Plain loops, first those that need no compiler: steps as they come are held against these alone.
PLAIN_EAGER = ("plain ERM", "plain ERM, autocast", "plain ERM, autocast, captured")
PLAIN_COMPILED = tuple(
    f"plain ERM, autocast, {how}" for how in ("compiled", "compiled, reduce-overhead", "compiled, captured")
)
PLAIN = (*PLAIN_EAGER, *PLAIN_COMPILED)
UNROLLED, DOUBLE = "unrolled, first order", "unrolled, double backward"
TENT, VNL, ANCHORED = "tent, all parameters", "vnl without anchor", "vnl with anchor"
LOOP, STREAM = "10,000 VNL iterations", "all PACS online, vnl with anchor"
STREAM_FREE = "all PACS online, vnl without anchor"
ITERATIONS = 10_000

Verdict = Literal["met", "missed", "not judged", "not measured"]


@dataclass(frozen=True)
class Goal:
    """At most `limit` times what it is held against, or at most `limit` seconds."""

    group: str
    subject: str
    limit: float
    against: tuple[str, ...] = ()  # the fastest of them counts; none: the limit is in seconds
    note: str = ""

    @property
    def unit(self) -> str:
        """What the figure is counted in."""
        return "x" if self.against else "s"


GOALS = (
    Goal("training", ERM, 1.0, PLAIN_EAGER),
    Goal("training", ERM + COMPILED, 1.0, PLAIN),
    Goal("training", FIRST, 2.0, (ERM,)),
    Goal("training", SECOND, 2.0, (FIRST,)),
    Goal("deeper", SECOND, 2.0, (FIRST,)),
    Goal("loop", LOOP, 360.0, note="the paper: 14.6 h on a 1080Ti"),
    Goal("stream", STREAM, 10.0, note="the paper: 5 m 33 s"),
    Goal("adaptation", VNL, 1.3, (TENT,)),
    Goal("adaptation", ANCHORED, 1.6, (TENT,)),
)


@dataclass(frozen=True)
class Judged:
    """A goal with its figure."""

    goal: Goal
    verdict: Verdict
    figure: float | None = None
    against: str = ""  # what it was held against
    why: str = ""  # there is no figure, or no verdict, or something it was not held against
    spread: tuple[float, float] | None = None  # the lowest and the highest ratio of a round


def judge(records: Sequence[BenchRecord]) -> list[Judged]:
    """Return every goal with what the records say of it."""
    return [_judged(goal, records) for goal in GOALS]


def _judged(goal: Goal, records: Sequence[BenchRecord]) -> Judged:
    group = {
        record.name: record for record in records if (record.part, record.group) == ("goals", goal.group)
    }
    subject = group.get(goal.subject)
    if subject is None or subject.seconds is None:
        return Judged(goal, "not measured", why=subject.error if subject else "not run")
    found = Judged(goal, "not judged", subject.seconds, why="the goal speaks of other sizes")
    if goal.against:
        best = fastest([group[name] for name in goal.against if name in group])
        if best is None:
            return Judged(goal, "not measured", why=f"nothing to hold it against: {', '.join(goal.against)}")
        found = replace(
            found,
            figure=ratio(subject.rounds, best.rounds),
            against=best.name,
            spread=spread(subject.rounds, best.rounds) if len(best.rounds) > 1 else None,
        )
    if not subject.judged:
        return found
    assert found.figure is not None
    verdict: Verdict = "met" if found.figure <= goal.limit else "missed"
    return replace(found, verdict=verdict, why=_left_out(goal, group))


def _left_out(goal: Goal, group: Mapping[str, BenchRecord]) -> str:
    """Return what a goal should have been held against and was not, in words; nothing if there is none."""
    absent = [name for name in goal.against if name not in group or group[name].seconds is None]
    return f"not held against {'; '.join(absent)} (no times here)" if absent else ""


def of_group(records: Sequence[BenchRecord], group: str) -> list[BenchRecord]:
    """Return the records of the goals' cases that were measured in turn with each other."""
    return [record for record in records if (record.part, record.group) == ("goals", group)]


def fastest(records: Sequence[BenchRecord]) -> BenchRecord | None:
    """Return the record with the smallest median; None where nothing was measured."""
    measured = [(record.seconds, index) for index, record in enumerate(records) if record.seconds is not None]
    return records[min(measured)[1]] if measured else None
