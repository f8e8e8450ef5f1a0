"""A benchmark's records to one self-contained page, with every figure beside it as PNG and CSV."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vicinal.benchmarks.spec import Spec
from vicinal.evaluation.example import Example, load_examples
from vicinal.evaluation.record import Record
from vicinal.report import content
from vicinal.report.board import Board, make_board
from vicinal.report.canvas import COLOURS
from vicinal.report.examples import image_data_uri
from vicinal.report.expectations import check_expectations
from vicinal.report.figures import row_styles
from vicinal.report.page import environment, replace_text
from vicinal.report.pictures import KINDS, Picture, pictures_of
from vicinal.report.plots import LineStyle
from vicinal.report.protocols import protocol_of
from vicinal.report.texts import Printed
from vicinal.report.views import (
    Table,
    agreement,
    anchor,
    expectation,
    facts_of,
    headlines,
    other_nets,
    table_of,
)
from vicinal.versions import versions

PAGE, FIGURES = "report.html", "figures"
_SECTIONS = {
    "expectations": "Expectations",
    "results": "Results",
    "curves": "Along the stream",
    "batch-size": "Batch size",
    "calibration": "Calibration",
    "cost": "Cost",
    "examples": "Images",
    "protocol": "Protocol",
    "versions": "Versions",
}


def write_benchmark(
    spec: Spec | None,
    records: Sequence[Record],
    folder: Path,
    examples: Sequence[Example] = (),
    *,
    page_only: bool = False,
) -> None:
    """Write report.html and figures/ into a folder; the page is replaced whole.

    The page shows all figures itself: with `page_only` it is written alone and links to no files.
    Without examples those are shown that the folder holds (`vicinal.evaluation.example.save_examples`).
    Without a spec the page shows what the records themselves hold: rows are methods, columns what they were
    measured on.
    """
    board = make_board(spec, records)
    styles = row_styles(board)
    pictures = pictures_of(board, styles)
    values = _values(spec, board, styles, pictures, examples or load_examples(folder))
    html = environment().get_template("benchmark.html.j2").render(**values, page_only=page_only)
    if not page_only:
        _write_figures(folder / FIGURES, pictures)
    replace_text(folder / PAGE, html)


def _values(
    spec: Spec | None,
    board: Board,
    styles: Mapping[str, LineStyle],
    pictures: Sequence[Picture],
    examples: Sequence[Example],
) -> dict[str, Any]:
    """Return all that the template asks for."""
    cited = frozenset() if spec is None else frozenset(row.label for row in spec.rows if row.method is None)
    tables = [table_of(column, board, cited) for column in board.columns]
    outcomes = [] if spec is None else check_expectations(spec, board)
    measured = [row for row in board.rows if any(row in column.complete for column in board.columns)]
    values = {
        "title": _title(spec, board),
        "note": () if spec is None else spec.paragraphs,
        "other_nets": [] if spec is None or board.quick else other_nets(spec, board),
        "quick": board.quick,
        "facts": facts_of(spec, board),
        "headlines": headlines(board),
        "agreement": agreement(board),
        "expectations": [expectation(outcome, board) for outcome in outcomes],
        "tables": tables,
        "ours": board.ours,
        "overview": list(_overview(board, tables)),
        "has_paper": any(table.has_paper for table in tables),
        "has_reference": any(table.reference for table in tables),
        "has_spread": any(cell.seeds > 1 for c in board.columns for cell in c.cells.values()),
        "legend": [_legend_entry(style) for style in styles.values()],
        "undrawn": len([row for row in measured if row not in styles]),
        "pictures": {kind: [p for p in pictures if p.kind == kind] for kind in KINDS},
        "examples": _grouped(examples),
        "protocols": [protocol_of(column, board) for column in board.columns if column.measured],
        "versions": content.shared(record.versions for record in board.records),
        "written_by": versions()["vicinal"],
    }
    return values | {"contents": _contents(values)}


def _title(spec: Spec | None, board: Board) -> str:
    if spec is not None:
        return spec.title
    names = dict.fromkeys(record.dataset for record in board.records)
    return f"Results on {', '.join(names)}".replace("_", " ")


def _contents(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the sections that the page has."""
    pictures = values["pictures"]
    there = {
        "calibration": pictures["reliability"] or pictures["ece"],
        "curves": pictures["curves"],
        "batch-size": pictures["batch-size"],
        "cost": pictures["cost"],
        "results": True,
        "protocol": True,
    }
    return [(name, text) for name, text in _SECTIONS.items() if there.get(name, values.get(name))]


def _overview(
    board: Board, tables: Sequence[Table]
) -> Iterable[tuple[str, list[tuple[Printed | None, str]]]]:
    """Yield every row with its cell, and the cell's name on the page, in each column."""
    found = [{line.row: line.cell for line in table.lines} for table in tables]
    for row in board.rows:
        if not board.laid_out and sum(row in cells for cells in found) < 2:
            continue  # of a table that nobody laid out only what compares across columns
        yield (
            row,
            [
                (cells.get(row), anchor(board, column, row))
                for cells, column in zip(found, board.columns, strict=True)
            ],
        )


def _legend_entry(style: LineStyle) -> dict[str, Any]:
    return {"label": style.label, "colour": COLOURS[style.color.lower()], "dashed": style.dashed}


def _grouped(examples: Sequence[Example]) -> list[tuple[str, list[dict[str, Any]]]]:
    groups = {
        "Wrong before, right after": [e for e in examples if e.fixed],
        "Right before, wrong after": [e for e in examples if e.broken],
        "As right or wrong as before": [e for e in examples if not e.fixed and not e.broken],
    }
    return [(heading, [_shown(e) for e in members]) for heading, members in groups.items() if members]


def _shown(example: Example) -> dict[str, Any]:
    """Return an example as printed."""
    facts = {
        "data": example.setting,
        "target": example.target,
        "method": example.method,
        "truth": example.truth,
    }
    return {
        "uri": image_data_uri(example.image),
        "truth": example.truth,
        "facts": [(name, value) for name, value in facts.items() if value],
        "predictions": [
            ("before", example.before, f"{example.before_confidence:.0%}", example.before == example.truth),
            ("after", example.after, f"{example.after_confidence:.0%}", example.after == example.truth),
        ],
    }


def _write_figures(folder: Path, pictures: Sequence[Picture]) -> None:
    """Write the figures; those of an earlier page that this one does not have are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    new = {f"{picture.name}{ending}" for picture in pictures for ending in (".png", ".csv")}
    for old in folder.iterdir():
        ours = old.suffix in (".png", ".csv") and old.name.startswith(tuple(f"{kind}-" for kind in KINDS))
        if ours and old.name not in new:
            old.unlink()
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png)
        (folder / f"{picture.name}.csv").write_text(picture.csv, encoding="utf-8")
