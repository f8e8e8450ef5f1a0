"""A table of cells as columns of texts, in the signs of one format, and what a reader has to know of it."""

from collections.abc import Callable
from dataclasses import dataclass

from vicinal.report.export import Cell, Column, Table
from vicinal.report.printed import MINUS, as_given, number, probability, signed

Change = Callable[[str], str]


@dataclass(frozen=True)
class Style:
    """How one format sets text: what it escapes, how it marks, which signs it has."""

    escape: Change
    bold: Change
    underline: Change
    plus_minus: str = "±"
    minus: str = MINUS
    dagger: str = "†"
    star: str = "*"


@dataclass(frozen=True)
class Printed:
    """One printed column: its two headings and its texts, from the first row to the last."""

    above: str
    below: str
    texts: list[str]


def printed_columns(table: Table, style: Style) -> list[Printed]:
    """Return what is printed for every column: the paper's figure, ours, and the difference to the baseline.

    Parts that no cell of a column has are left out.
    """
    shared = len(_counts(table)) < 2
    made: list[Printed] = []
    for index, column in enumerate(table.columns):
        cells = [row.cells[index] for row in table.rows]
        parts: dict[str, list[str]] = {}
        if any(cell.paper is not None for cell in cells):
            parts["paper"] = [_paper(cell, column, style) for cell in cells]
        if any(cell.measured for cell in cells) or not parts:
            parts["ours" if parts else ""] = [_ours(cell, column, style, shared) for cell in cells]
        if any(cell.versus for cell in cells):
            parts[f"vs {table.baseline}"] = [_versus(cell, column, style) for cell in cells]
        made += [Printed(*_headings(column, part, len(parts) > 1), texts) for part, texts in parts.items()]
    return made


def _headings(column: Column, part: str, several: bool) -> tuple[str, str]:
    if column.group:
        return column.group, " ".join(filter(None, (column.heading, part)))
    return (column.heading, part) if several else ("", " ".join(filter(None, (column.heading, part))))


def _counts(table: Table) -> set[int]:
    """Return the numbers of seeds, of cells with more than one."""
    return {cell.count for row in table.rows for cell in row.cells if cell.count > 1}


def _ours(cell: Cell, column: Column, style: Style, shared_count: bool) -> str:
    if cell.mean is None:
        return ""
    decimals = column.measure.decimals
    text = _marked(number(cell.mean, decimals).replace(MINUS, style.minus), cell.rank, style)
    if cell.std is not None:
        text += f" {style.plus_minus} {number(cell.std, decimals)}"
    text += style.dagger if cell.count == 1 else "" if shared_count else f" ({cell.count})"
    return f"{text} {style.star}" if cell.unfinished else text


def _marked(text: str, rank: int | None, style: Style) -> str:
    if rank is None:
        return text
    return style.bold(text) if rank == 0 else style.underline(text)


def _paper(cell: Cell, column: Column, style: Style) -> str:
    if cell.paper is None:
        return ""
    decimals = column.measure.decimals
    spread = "" if cell.paper_std is None else f" {style.plus_minus} {as_given(cell.paper_std, decimals)}"
    return as_given(cell.paper, decimals).replace(MINUS, style.minus) + spread


def _versus(cell: Cell, column: Column, style: Style) -> str:
    if cell.versus is None:
        return ""
    text = signed(cell.versus.difference, column.measure.decimals).replace(MINUS, style.minus)
    return text if cell.p is None else f"{text} (p {style.escape(probability(cell.p))})"


def legend(table: Table) -> list[str]:
    """Return what a reader needs to know of the table: spread, seeds, marks, comparisons; plain sentences."""
    cells = [cell for row in table.rows for cell in row.cells if cell.measured]
    lines = list(table.notes)
    counts = _counts(table)
    if counts:
        number = f"{next(iter(counts))} seeds" if len(counts) == 1 else "seeds, their number in brackets"
        lines.append(f"mean ± standard deviation over {number}")
    if any(cell.count == 1 for cell in cells):
        lines.append("† one seed: its spread is unknown")
    if any(cell.rank is not None for cell in cells):
        lines.append("best in bold, runner-up underlined; means that print alike share")
    if any(cell.unfinished for cell in cells):
        rest = "" if all(cell.complete for cell in cells) else "; where all do, the mean does not compete"
        lines.append(f"* seeds that lack a target of the column do not count{rest}")
    if any(cell.versus for cell in cells):
        test = "; p of a two-sided sign-flip test over seeds" if any(c.p is not None for c in cells) else ""
        lines.append(f"vs {table.baseline}: mean difference over shared seeds{test}")
    if any(cell.paper is not None for row in table.rows for cell in row.cells):
        lines.append("paper: as printed there")
    return lines
