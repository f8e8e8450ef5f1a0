"""Cases into measurements: counted, built, warmed up, then timed in turn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vicinal.benchmarks.bench.cases import Case
from vicinal.benchmarks.bench.floor import Count, counting
from vicinal.benchmarks.bench.memory import peak_of, settled
from vicinal.benchmarks.bench.timing import Timed, Work, interleaved, reason, release, warmed

Counted = tuple[Count | None, str]  # what a step computes, or why that is not known


@dataclass(frozen=True)
class Measurement:
    """What was found of a case."""

    case: Case
    timed: Timed
    peak_bytes: int | None = None
    count: Count | None = None
    uncounted: str = ""  # why there is no count


def counted(case: Case, device: torch.device) -> Counted:
    """Return what one step computes, counted on a copy of its own, or why it cannot be counted."""
    try:
        return _count_of(case), ""
    except Exception as error:  # its record says so; timing the case shows whether more is wrong with it
        return None, reason(error)
    finally:
        release(device)


def _count_of(case: Case) -> Count:
    work = case.build()
    with counting() as count:
        work()
    return count


def counts_of(cases: Sequence[Case], device: torch.device) -> dict[str, Counted]:
    """Return the count of every case by name; one that hides its own has that of another before it."""
    found: dict[str, Counted] = {}
    for case in cases:
        found[case.name] = found[case.same_as] if case.same_as else counted(case, device)
    return found


def measure(
    cases: Sequence[Case], device: torch.device, rounds: int, round_seconds: float, count: bool = True
) -> list[Measurement]:
    """Return a measurement of every case, in order; one that fails carries its reason."""
    counts = counts_of(cases, device) if count else {}
    works: dict[str, Work] = {}
    repeats: dict[str, int] = {}
    found: dict[str, Measurement] = {}
    for case in sorted(cases, key=lambda case: not case.early):
        known, unknown = counts.get(case.name, (None, ""))
        found[case.name] = Measurement(case, Timed(), None, known, unknown)
        try:
            works[case.name], repeats[case.name], peak = _ready(case, device, round_seconds)
            found[case.name] = replace(found[case.name], peak_bytes=peak)
        except Exception as error:  # too little memory, no compiler: the others go on
            found[case.name] = replace(found[case.name], timed=Timed(error=reason(error)))
    if device.type == "cuda":  # settling has emptied the allocator's cache: round one would fill it again
        interleaved(works, dict.fromkeys(works, 1), device, 1)
    for name, timed in interleaved(works, repeats, device, rounds).items():
        found[name] = replace(found[name], timed=timed)
    works.clear()
    release(device)
    return [found[case.name] for case in cases]


def _ready(case: Case, device: torch.device, round_seconds: float) -> tuple[Work, int, int | None]:
    """Return a case's step warmed up, how many of them make a round, and the memory they take."""
    before = settled(device)
    work = case.build()
    repeats = warmed(work, device, round_seconds)
    return work, repeats, peak_of(work, device, before)
