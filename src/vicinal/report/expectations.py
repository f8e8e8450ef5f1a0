"""What a spec expects of our run, checked against what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from vicinal.benchmarks.spec import Expect, Spec
from vicinal.evaluation.statistics import Paired, paired
from vicinal.report.board import Board

# A mean that equals a bound must not fall below it by the rounding of a sum.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Outcome:
    """One expectation and whether it was met; None where one side was not measured."""

    expect: Expect
    met: bool | None
    value: float | None = None  # our mean; against another row, over the seeds that both have
    seeds: int = 0  # that it is a mean of
    bound: float | None = None  # the number, or the other row's mean
    against: Paired | None = None  # the other row, over the seeds that both have


def check_expectations(spec: Spec, board: Board) -> list[Outcome]:
    """Return the outcome of every expectation, in the order of the spec."""
    return [_outcome(expect, board) for expect in spec.expects]


def measured(expect: Expect, board: Board) -> Mapping[int, float]:
    """Return the value of each seed that an expectation is about; empty where nothing was measured."""
    cell = board.cell(expect.row, expect.setting)
    return {} if cell is None else cell.of(expect.target)


def _outcome(expect: Expect, board: Board) -> Outcome:
    here = measured(expect, board)
    number = expect.at_least if expect.at_least is not None else expect.at_most
    other = expect.above if expect.above is not None else expect.below
    against = None
    if other is not None:
        rival = measured(replace(expect, row=other), board)
        # Seeds differ by more than methods do: a seed that one side lacks would decide the comparison.
        if both := here.keys() & rival.keys():
            against = paired(here, rival)
            here, rival = ({seed: side[seed] for seed in both} for side in (here, rival))
        number = fmean(rival.values()) if rival else None
    value = fmean(here.values()) if here else None
    if value is None or number is None or (other is not None and against is None):
        return Outcome(expect, None, value, len(here), number)
    ahead = number - value if expect.at_most is not None or expect.below is not None else value - number
    slack = ahead + expect.tolerance
    # Above a row is above, not level with it; at least a number includes the number.
    met = slack > _ROUNDING if other is not None else slack >= -_ROUNDING
    return Outcome(expect, met, value, len(here), number, against)
