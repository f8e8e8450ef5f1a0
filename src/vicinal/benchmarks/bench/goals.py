"""The goals, and what records say of them: a figure each, met or missed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vicinal.benchmarks.bench.records import BenchRecord
from vicinal.benchmarks.bench.timing import ratio

ERM, FIRST, SECOND = "ERM step", "VNL first order", "VNL second order"
COMPILED = ", compiled"  # after the name of a step whose net is
PLAIN = ("plain ERM", "plain ERM, autocast", "plain ERM, autocast, compiled")
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
    Goal("training", ERM, 1.0, PLAIN),
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
    why: str = ""  # there is no figure, or no verdict


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
    figure, against = subject.seconds, ""
    if goal.against:
        best = fastest([group[name] for name in goal.against if name in group])
        if best is None:
            return Judged(goal, "not measured", why=f"nothing to hold it against: {', '.join(goal.against)}")
        figure, against = ratio(subject.rounds, best.rounds), best.name
    if not subject.judged:
        return Judged(goal, "not judged", figure, against, "the goal speaks of other sizes")
    return Judged(goal, "met" if figure <= goal.limit else "missed", figure, against)


def of_group(records: Sequence[BenchRecord], group: str) -> list[BenchRecord]:
    """Return the records of the goals' cases that were measured in turn with each other."""
    return [record for record in records if (record.part, record.group) == ("goals", group)]


def fastest(records: Sequence[BenchRecord]) -> BenchRecord | None:
    """Return the record with the smallest median; None where nothing was measured."""
    measured = [(record.seconds, index) for index, record in enumerate(records) if record.seconds is not None]
    return records[min(measured)[1]] if measured else None
