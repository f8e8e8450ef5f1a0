"""What a spec expects of our run, checked against what was measured."""

from dataclasses import dataclass

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
    value: float | None = None  # our mean
    bound: float | None = None  # the number, or the other row's mean
    against: Paired | None = None  # the other row, over the seeds that both have


def check_expectations(spec: Spec, board: Board) -> list[Outcome]:
    """Return the outcome of every expectation, in the order of the spec."""
    return [_outcome(expect, board) for expect in spec.expects]


def _outcome(expect: Expect, board: Board) -> Outcome:
    cell = board.cell(expect.row, expect.setting)
    value = cell.summary.mean if cell is not None and cell.summary is not None else None
    number = expect.at_least if expect.at_least is not None else expect.at_most
    other = expect.above if expect.above is not None else expect.below
    against = None
    if other is not None:
        rival = board.cell(other, expect.setting)
        number = rival.summary.mean if rival is not None and rival.summary is not None else None
        if cell is not None and rival is not None and cell.values.keys() & rival.values.keys():
            against = paired(cell.values, rival.values)
    if value is None or number is None:
        return Outcome(expect, None, value, number)
    ahead = number - value if expect.at_most is not None or expect.below is not None else value - number
    slack = ahead + expect.tolerance
    # Above a row is above, not level with it; at least a number includes the number.
    met = slack > _ROUNDING if other is not None else slack >= -_ROUNDING
    return Outcome(expect, met, value, number, against)
