"""What the page of a benchmark says, section by section: cells to printed texts, without any markup."""

import math
from dataclasses import dataclass

from vicinal.benchmarks.metric import METRICS
from vicinal.benchmarks.spec import SUFFIX, Spec, spec_names
from vicinal.benchmarks.store import result_of
from vicinal.evaluation.statistics import summary
from vicinal.report import series
from vicinal.report.board import Board, Cell, Column
from vicinal.report.expectations import Outcome
from vicinal.report.printed import as_given, number
from vicinal.report.texts import (
    Difference,
    Printed,
    best_rows,
    difference_to_paper,
    difference_to_reference,
    printed_cell,
    seeds_text,
    value_and_spread,
    with_unit,
)


@dataclass(frozen=True)
class TargetCell:
    """A cell on one target."""

    value: str
    seeds: int
    paper: str
    to_paper: Difference | None


@dataclass(frozen=True)
class Line:
    """One row of a column's tables."""

    row: str
    anchor: str  # of its protocol; empty for a row of the paper alone
    tags: list[str]
    is_reference: bool
    is_ours: bool
    cell: Printed
    targets: list[TargetCell | None]
    measures: list[str]  # ECE, NLL, Brier score, milliseconds per image


@dataclass(frozen=True)
class Table:
    """The tables of one column."""

    name: str
    heading: str  # metric and unit
    reference: str
    targets: list[str]
    lines: list[Line]
    has_paper: bool
    has_paper_gain: bool
    has_unfinished: bool
    note: str  # what to know of its figures besides; empty without

    @property
    def measured_lines(self) -> list[Line]:
        """Return the lines with calibration and cost."""
        return [line for line in self.lines if line.measures]


def table_of(column: Column, board: Board, cited: frozenset[str]) -> Table:
    """Return a column as printed."""
    best, order = best_rows(column), _order(column, board)
    lines = [
        Line(
            row=row,
            anchor=anchor(board, column, row) if cell.records else "",
            tags=_tags(row, column, cited),
            is_reference=row == column.reference,
            is_ours=row in board.ours,
            cell=printed_cell(cell, column, best),
            targets=[_target_cell(cell, column, target) for target in column.parts],
            measures=_measures(cell) if cell.values else [],
        )
        for row, cell in ((row, column.cells[row]) for row in order)
    ]
    return Table(
        column.name,
        heading(column.metric),
        column.reference or "",
        list(column.parts),
        lines,
        has_paper=any(line.cell.paper for line in lines),
        has_paper_gain=any(line.cell.paper_to_reference for line in lines),
        has_unfinished=any(line.cell.unfinished for line in lines),
        note=_by_chance(column) if column.metric == "ece" else "",
    )


def heading(metric: str) -> str:
    """Return a metric with its unit."""
    name = {"ece": "ECE", "nll": "NLL", "brier": "Brier score"}.get(metric, metric.replace("_", " "))
    return f"{name}, {METRICS[metric].unit}" if METRICS[metric].unit else name


def _by_chance(column: Column) -> str:
    """Return how large a column's calibration errors would be by chance alone; empty where nobody can say."""
    levels = [one.by_chance for one in series.errors_of(column).values() if math.isfinite(one.by_chance)]
    if not levels:
        return ""
    low, high = number(min(levels), 1), number(max(levels), 1)
    between = f"{low}%" if low == high else f"{low} to {high}%"
    return f"A row that was right exactly as often as it is sure would still have {between} by chance."


def anchor(board: Board, column: Column, row: str) -> str:
    """Return the name by which the page knows a cell."""
    return f"cell-{board.columns.index(column) + 1}-{board.rows.index(row) + 1}"


def _order(column: Column, board: Board) -> list[str]:
    """Return the rows in the table's order; of a table that nobody laid out the best first."""
    rows = [row for row in board.rows if row in column.cells]
    if board.laid_out:
        return rows
    sign = -1 if column.reading.higher_is_better else 1
    means = {row: cell.summary.mean for row, cell in column.complete.items() if cell.summary}
    last = float("inf")
    return sorted(
        rows, key=lambda row: (row != column.reference, sign * means[row] if row in means else last)
    )


def _tags(row: str, column: Column, cited: frozenset[str]) -> list[str]:
    tags = ["reference"] if row == column.reference else []
    return tags + (["cited"] if row in cited else [])


def _target_cell(cell: Cell, column: Column, target: str) -> TargetCell | None:
    values, figure = cell.of(target), cell.paper_by_target.get(target)
    found = summary(list(values.values())) if values else None
    if found is None and figure is None:
        return None
    decimals = column.reading.decimals
    both = found is not None and figure is not None
    return TargetCell(
        value_and_spread(found, decimals) if found else "",
        found.count if found else 0,
        as_given(figure.value, decimals) if figure else "",
        difference_to_paper(found, figure.value, column.reading) if both and found and figure else None,
    )


def _measures(cell: Cell) -> list[str]:
    found = series.over_seeds(cell, series.ece)
    loss, brier = (series.over_seeds(cell, METRICS[name].value) for name in ("nll", "brier"))
    time = 1000 * series.over_seeds(cell, series.seconds_per_image).mean
    return [value_and_spread(found), number(loss.mean, 3), number(brier.mean, 3), f"{time:.3g}"]


@dataclass(frozen=True)
class Expectation:
    """An expectation in words."""

    met: bool | None
    what: str
    found: str


def expectation(outcome: Outcome, board: Board) -> Expectation:
    """Return an expectation and what came of it, in words."""
    expect = outcome.expect
    metric = next((METRICS[c.metric] for c in board.columns if c.name == expect.setting), METRICS["accuracy"])
    bounds = {
        "at least": expect.at_least,
        "at most": expect.at_most,
        "above": expect.above,
        "below": expect.below,
    }
    word, bound = next((word, bound) for word, bound in bounds.items() if bound is not None)
    named = bound if isinstance(bound, str) else as_given(bound, metric.decimals)
    where = expect.setting if expect.target is None else f"{expect.setting}, {expect.target}"
    what = f"{where}: {expect.row} {word} {named}"
    if expect.tolerance > 0:
        what += f", give or take {expect.tolerance:g}"
    if expect.tolerance < 0:
        what += f" by more than {-expect.tolerance:g}"
    if outcome.met is None or outcome.value is None or outcome.bound is None:
        both = outcome.value is not None and outcome.bound is not None
        return Expectation(None, what, "no seed in common" if both else "not measured")
    value, level = (with_unit(number(n, metric.decimals), metric) for n in (outcome.value, outcome.bound))
    found = f"{value} here ({seeds_text(outcome.seeds)})"
    if isinstance(bound, str):
        found += f", {bound} {level}"
    if outcome.against is not None:
        gap = difference_to_reference(outcome.against, metric)
        found += f"; difference {gap.text}" + (f" ({gap.detail})" if gap.detail else "")
    return Expectation(outcome.met, what, found)


def other_nets(spec: Spec, board: Board) -> list[str]:
    """Return a sentence for every net that was measured in place of the one a column asks for."""
    pairs = {
        (record.backbone, spec.setting(column.name).backbone)
        for column in board.columns
        for record in column.records
    }
    return [
        f"Measured with {net}, not with {asked}, which the table asks for."
        for net, asked in sorted(pairs, key=str)
        if asked is not None and asked != net
    ]


def headlines(board: Board) -> list[tuple[str, str, str]]:
    """Return (column, row, sentence) for each column: the paper's method, else the best row."""
    lines = []
    for column in board.columns:
        best = best_rows(column)
        rows = [row for row in column.complete if row in board.ours] or [
            r for r in column.complete if r in best
        ]
        for row in rows[:1]:
            lines.append((column.name, row, _sentence(column.cells[row], column)))
    return lines


def _sentence(cell: Cell, column: Column) -> str:
    metric, found = column.reading, cell.summary
    assert found is not None
    text = f"{with_unit(value_and_spread(found, metric.decimals), metric)} ({seeds_text(found.count)})"
    if cell.against is not None and column.reference is not None:
        gap = difference_to_reference(cell.against, metric)
        base = column.cells[column.reference].values
        both = summary([base[seed] for seed in base.keys() & cell.values.keys()])  # the gap is of these
        text += f", {gap.text} against {column.reference} ({number(both.mean, metric.decimals)})"
    return text + "."


def agreement(board: Board) -> str:
    """Return how many of the paper's figures our runs agree with; empty where nothing compares."""
    words: dict[str, int] = {}
    for column in board.columns:
        for cell in column.complete.values():
            if cell.paper is not None and cell.summary is not None:
                word = difference_to_paper(cell.summary, cell.paper.value, column.reading).word or "one seed"
                words[word] = words.get(word, 0) + 1
    if not words:
        return ""
    said = {
        "equal": "equal to ours as printed",
        "unclear": "within our 95% interval",
        "better": "where ours is better",
        "worse": "where ours is worse",
        "one seed": "beside a single seed of ours, which says nothing of chance",
    }
    parts = [f"{words[word]} {text}" for word, text in said.items() if word in words]
    total = sum(words.values())
    return f"{total} {'figure' if total == 1 else 'figures'} of the paper measured here: {'; '.join(parts)}."


def facts_of(spec: Spec | None, board: Board) -> list[tuple[str, str]]:
    """Return what was measured, as pairs of name and value."""
    records = board.records

    def values(name: str) -> str:
        return ", ".join(map(str, dict.fromkeys(getattr(record, name) for record in records)))

    counts = sorted({cell.seeds for column in board.columns for cell in column.complete.values()})
    several = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else "".join(map(str, counts))
    facts = [("in the paper", spec.paper)] if spec is not None and spec.paper else []
    if spec is not None:
        own = "" if spec.name in spec_names() else SUFFIX  # a table of one's own is called by its file
        facts.append(("command", f"vicinal reproduce {spec.name}{own}"))
    facts += [("data", values("dataset")), ("backbone", values("backbone"))]
    facts += [("batch size", values("batch_size")), ("stream", values("stream").replace("_", " "))]
    # A column that differs from another in its metric alone shows the same runs.
    runs = len(records) if spec is None else len({result_of(record) for record in records})
    return [*facts, ("seeds", several), ("runs", str(runs))]
