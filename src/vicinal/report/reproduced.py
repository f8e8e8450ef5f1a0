"""A benchmark for the terminal and its README: the paper's figures beside ours, and what was expected."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table as RichTable

from vicinal.benchmarks.spec import Spec
from vicinal.benchmarks.store import PACKED, RECORDS
from vicinal.evaluation.record import Record
from vicinal.report.board import Board, make_board
from vicinal.report.expectations import check_expectations
from vicinal.report.formats import markdown_text
from vicinal.report.page import replace_text
from vicinal.report.texts import Printed
from vicinal.report.views import Expectation, Table, TargetCell, expectation, other_nets, table_of

HEADINGS = ("Method", "Paper", "Ours (seeds)", "Difference")
WORDS = {True: "met", False: "missed", None: "not measured"}
QUICK = "A quick run: it shows that everything runs, its figures mean nothing."


def board_tables(spec: Spec, board: Board) -> list[Table]:
    """Return the columns of a benchmark as printed."""
    cited = frozenset(row.label for row in spec.rows if row.method is None)
    return [table_of(column, board, cited) for column in board.columns]


def _ours(cell: Printed) -> str:
    text = f"{cell.value} {cell.std}".strip()
    return f"{text} ({cell.seeds})" + (" *" if cell.unfinished else "") if text else ""


def _on_target(cell: TargetCell) -> str:
    return f"{cell.value} ({cell.seeds})" if cell.value else ""


def _difference(cell: Printed | TargetCell) -> str:
    return "" if cell.to_paper is None else cell.to_paper.text


def results_rich(spec: Spec, records: Sequence[Record]) -> RichTable:
    """Return paper, ours and their difference for the terminal, a section for each column of the paper."""
    tables = board_tables(spec, make_board(spec, records))
    unfinished = any(table.has_unfinished for table in tables)
    table = RichTable(
        box=SIMPLE_HEAD, caption="* a seed lacks a target and does not count" if unfinished else None
    )
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left", no_wrap=bool(number))
    for part in tables:
        table.add_section()
        table.add_row(f"[dim]{escape(part.name)}: {escape(part.heading)}[/dim]")
        for line in part.lines:
            ours = escape(_ours(line.cell))
            shown = f"[bold]{ours}[/bold]" if line.cell.best else ours
            table.add_row(escape(line.row), escape(line.cell.paper), shown, _difference(line.cell))
        for target, cells in _printed_targets(part).items():
            table.add_section()
            table.add_row(f"[dim]{escape(part.name)}, {escape(target)}[/dim]")
            for row, cell in cells.items():
                table.add_row(escape(row), escape(cell.paper), _on_target(cell), _difference(cell))
    return table


def _printed_targets(part: Table) -> dict[str, dict[str, TargetCell]]:
    """Return the rows on every target that the paper prints a figure of: columns of the paper's own."""
    columns = {
        target: {line.row: cell for line in part.lines if (cell := line.targets[place]) is not None}
        for place, target in enumerate(part.targets)
    }
    return {target: cells for target, cells in columns.items() if any(c.paper for c in cells.values())}


def expectations_of(spec: Spec, records: Sequence[Record]) -> list[Expectation]:
    """Return what the spec expects and what came of it, in words."""
    board = make_board(spec, records)
    return [expectation(outcome, board) for outcome in check_expectations(spec, board)]


def _by_target(table: Table) -> list[str]:
    """Return a column's targets side by side with the paper's figures; empty for one target alone."""
    if len(table.targets) < 2:
        return []
    lines = ["", "By target:", "", "| Method | " + " | ".join(map(markdown_text, table.targets)) + " |"]
    lines.append("|---|" + "---:|" * len(table.targets))
    for line in table.lines:
        cells = [
            "" if cell is None else f"{cell.value}, paper {cell.paper}" if cell.paper else cell.value
            for cell in line.targets
        ]
        if any(cells):
            lines.append("| " + " | ".join(map(markdown_text, (line.row, *cells))) + " |")
    return lines


def write_readme(
    spec: Spec, records: Sequence[Record], folder: Path, command: str, notes: Sequence[str] = ()
) -> None:
    """Write the README of a benchmark's folder: its command, tables, what was expected, what is missing."""
    board = make_board(spec, records)
    lines = [f"# {markdown_text(spec.title)}", "", f"{spec.paper}." if spec.paper else ""]
    lines += ["", "```", command, "```"]
    lines += [line for part in spec.paragraphs for line in ("", markdown_text(part))]
    lines += [line for other in other_nets(spec, board) for line in ("", f"**{markdown_text(other)}**")]
    if board.quick:
        lines += ["", f"**{QUICK}**"]
    for table in board_tables(spec, board):
        lines += ["", f"## {markdown_text(table.name)}", "", markdown_text(table.heading), ""]
        lines += ["| " + " | ".join(HEADINGS) + " |", "|---|---:|---:|---:|"]
        for line in table.lines:
            ours = markdown_text(_ours(line.cell))
            cells = (
                markdown_text(line.row),
                markdown_text(line.cell.paper),
                f"**{ours}**" if line.cell.best else ours,
                _difference(line.cell),
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", markdown_text(table.note)] if table.note else []
        lines += _by_target(table)
    expected = expectations_of(spec, records)
    if expected:
        lines += ["", "## Expected", ""]
        lines += [
            f"- {WORDS[one.met]}: {markdown_text(one.what)}. {markdown_text(one.found)}" for one in expected
        ]
    if notes:
        lines += ["", "## Missing", "", *(f"- {markdown_text(note)}" for note in notes)]
    file = PACKED if (folder / PACKED).exists() else RECORDS
    lines += ["", f"Every run with its whole protocol is in `{file}`, figures and curves in `report.html`."]
    replace_text(folder / "README.md", "\n".join(lines) + "\n")
