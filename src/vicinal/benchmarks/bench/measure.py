"""Cases into measurements: counted, built, warmed up, then timed in turn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vicinal.benchmarks.bench.cases import Case
from vicinal.benchmarks.bench.floor import Count, counting
from vicinal.benchmarks.bench.timing import PeakMemory, Timed, Work, interleaved, reason, release, warmed


@dataclass(frozen=True)
class Measurement:
    """What was found of a case."""

    case: Case
    timed: Timed
    peak_bytes: int | None = None
    count: Count | None = None


def counted(case: Case, device: torch.device) -> Count | None:
    """Return what one step computes, counted on a copy of its own; None where it cannot be."""
    try:
        work = case.build()
        with counting() as count:
            work()
    except Exception:  # timing the case will say what is wrong with it, if it is the case
        return None
    finally:
        release(device)
    return count


def measure(
    cases: Sequence[Case], device: torch.device, rounds: int, round_seconds: float, count: bool = True
) -> list[Measurement]:
    """Return a measurement of every case, in order; one that fails carries its reason."""
    counts: dict[str, Count | None] = {}
    for case in cases:
        known = counts.get(case.same_as)
        counts[case.name] = known if case.same_as or not count else counted(case, device)
    works: dict[str, Work] = {}
    repeats: dict[str, int] = {}
    found: dict[str, Measurement] = {}
    for case in cases:
        memory = PeakMemory(device)
        try:
            with memory:
                works[case.name] = case.build()
                repeats[case.name] = warmed(works[case.name], device, round_seconds)
            timed = Timed()
        except Exception as error:  # too little memory, no compiler: the others go on
            works.pop(case.name, None)
            timed = Timed(error=reason(error))
        found[case.name] = Measurement(case, timed, memory.bytes, counts[case.name])
    for name, timed in interleaved(works, repeats, device, rounds).items():
        found[name] = replace(found[name], timed=timed)
    works.clear()
    release(device)
    return [found[case.name] for case in cases]
