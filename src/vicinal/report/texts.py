"""Cells as printed: numbers to texts, differences with a sign and a word, nothing of markup."""

import math
from dataclasses import dataclass

from vicinal.benchmarks.metric import Metric
from vicinal.evaluation.statistics import Paired, Summary
from vicinal.report.board import Cell, Column
from vicinal.report.printed import as_given, leaders, number, probability, signed

BETTER, WORSE, UNCLEAR, EQUAL = "better", "worse", "unclear", "equal"


@dataclass(frozen=True)
class Difference:
    """A difference as printed: signed, with a word that says which way, and what was tested."""

    text: str
    word: str = ""  # better, worse, unclear, equal as printed; empty where one seed says nothing of chance
    detail: str = ""

    @property
    def kind(self) -> str:
        """Return the name its colour goes by."""
        return self.word if self.word in (BETTER, WORSE) else "plain"


@dataclass(frozen=True)
class Printed:
    """One cell as printed."""

    row: str
    value: str  # empty where no seed was measured on every target
    std: str
    seeds: int
    unfinished: int
    paper: str
    to_paper: Difference | None
    to_reference: Difference | None
    paper_to_reference: str
    best: bool = False


def spread(found: Summary, decimals: int = 1) -> str:
    """Return '± std'; empty for one seed, whose spread is unknown."""
    return "" if found.std is None else f"± {number(found.std, decimals)}"


def value_and_spread(found: Summary, decimals: int = 1) -> str:
    """Return 'mean ± std'."""
    return f"{number(found.mean, decimals)} {spread(found, decimals)}".strip()


def with_unit(text: str, metric: Metric) -> str:
    """Return a printed number with its unit."""
    return f"{text}{metric.unit}" if metric.unit in ("%", "") else f"{text} {metric.unit}"


def seeds_text(count: int) -> str:
    """Return how many seeds, in words."""
    return "1 seed" if count == 1 else f"{count} seeds"


def difference_to_paper(found: Summary, paper: float, metric: Metric) -> Difference:
    """Return how far our mean lies from the paper's figure; unclear where it is within our 95% interval."""
    gap = found.mean - paper
    if found.low is None or found.high is None:
        return Difference(signed(gap, metric.decimals))
    inside = found.low <= paper <= found.high
    return _difference(gap, inside, metric, "")


def difference_to_reference(against: Paired, metric: Metric) -> Difference:
    """Return a paired difference with its interval and p; unclear where the interval holds zero."""
    if against.low is None or against.high is None:
        return Difference(signed(against.difference, metric.decimals))
    detail = f"{signed(against.low, metric.decimals)} to {signed(against.high, metric.decimals)}"
    detail += ", untested" if against.p is None else f", p {probability(against.p)}"
    return _difference(against.difference, against.low <= 0 <= against.high, metric, detail)


def _difference(gap: float, by_chance: bool, metric: Metric, detail: str) -> Difference:
    text = signed(gap, metric.decimals)
    if text == signed(0.0, metric.decimals):
        return Difference(text, EQUAL, detail)
    if by_chance or not math.isfinite(gap):
        return Difference(text, UNCLEAR, detail)
    return Difference(text, BETTER if (gap > 0) == metric.higher_is_better else WORSE, detail)


def printed_cell(cell: Cell, column: Column, best: frozenset[str] = frozenset()) -> Printed:
    """Return a cell's texts."""
    metric, found = column.reading, cell.summary
    reference = column.cells[column.reference] if column.reference is not None else None
    paper_gap = ""
    if cell.paper and reference is not None and reference.paper and reference is not cell:
        paper_gap = signed(cell.paper.value - reference.paper.value, metric.decimals)
    return Printed(
        row=cell.row,
        value=number(found.mean, metric.decimals) if found else "",
        std=spread(found, metric.decimals) if found else "",
        seeds=cell.seeds,
        unfinished=cell.unfinished,
        paper=printed_paper(cell, metric.decimals),
        to_paper=difference_to_paper(found, cell.paper.value, metric) if found and cell.paper else None,
        to_reference=difference_to_reference(cell.against, metric) if cell.against else None,
        paper_to_reference=paper_gap,
        best=cell.row in best,
    )


def printed_paper(cell: Cell, decimals: int) -> str:
    """Return the paper's figure for a cell; empty without one."""
    if cell.paper is None:
        return ""
    std = "" if cell.paper.std is None else f" ± {as_given(cell.paper.std, decimals)}"
    return as_given(cell.paper.value, decimals) + std


def best_rows(column: Column) -> frozenset[str]:
    """Return the measured rows that share the best mean of a column, as printed; a row alone is no winner."""
    rows = list(column.complete)
    means = [found.mean for found in (column.cells[row].summary for row in rows) if found is not None]
    ranks = leaders(means, column.reading.decimals, column.reading.higher_is_better)
    return frozenset(row for row, rank in zip(rows, ranks, strict=True) if rank == 0)
