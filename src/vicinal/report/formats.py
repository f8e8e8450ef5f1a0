"""A table of cells in print: CSV and JSON with every number; Markdown, LaTeX and the terminal for reading."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from textwrap import wrap
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from vicinal.evaluation.record import finite_or_none
from vicinal.report.export import Cell, Row, Table
from vicinal.report.layout import Change, Printed, Style, legend, printed_columns
from vicinal.report.printed import MINUS

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    MINUS: "$-$",
    "°": r"$^\circ$",
    **{sign: f"\\{sign}" for sign in "&%$#_"},
    # At the start of a line they would belong to the line break before it.
    **{sign: f"{{{sign}}}" for sign in "[]*"},
}
_MARKDOWN = {sign: f"\\{sign}" for sign in "\\|*_`[]~"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def latex_text(text: str) -> str:
    """Return a text that LaTeX prints as it stands."""
    plain = "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))
    return plain.replace("--", "-{}-")  # two hyphens in a row would be set as a dash


def markdown_text(text: str) -> str:
    """Return a text that Markdown prints as it stands, inside a table too."""
    return "".join(_MARKDOWN.get(sign, sign) for sign in " ".join(text.split()))


_MIN_HEAD = 12
_UNLIMITED = 100_000

LATEX = Style(latex_text, "\\textbf{{{}}}".format, "\\underline{{{}}}".format, r"$\pm$", "$-$", r"$^\dagger$")
MARKDOWN = Style(markdown_text, "**{}**".format, "<ins>{}</ins>".format, star="\\*")
TERMINAL = Style(escape, "[bold]{}[/bold]".format, "[underline]{}[/underline]".format)


def as_markdown(table: Table) -> str:
    """Return the table in Markdown with its title above and its legend below."""
    columns = printed_columns(table, MARKDOWN)
    heads = [*table.headings, *(_one_line(column) for column in columns)]
    lines = [f"**{markdown_text(table.title)}**", "", _markdown_line(map_texts(heads, markdown_text))]
    lines.append("|" + "---|" * len(table.headings) + "---:|" * len(columns))
    for index, row in enumerate(table.rows):
        texts = [column.texts[index] for column in columns]
        lines.append(_markdown_line([*map_texts(row.names, markdown_text), *texts]))
    notes = [markdown_text(line) for line in legend(table)]
    return "\n".join([*lines, "", "; ".join(notes) + "." if notes else ""]).rstrip() + "\n"


def map_texts(texts: Sequence[str], change: Change) -> list[str]:
    """Return texts, each changed."""
    return [change(text) for text in texts]


def _one_line(column: Printed) -> str:
    return " ".join(filter(None, (column.above, column.below)))


def _markdown_line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def as_latex(table: Table) -> str:
    """Return a LaTeX table for booktabs, with caption."""
    columns = printed_columns(table, LATEX)
    body = [
        [*map_texts(row.names, latex_text), *(column.texts[index] for column in columns)]
        for index, row in enumerate(table.rows)
    ]
    caption = ". ".join(line[:1].upper() + line[1:] for line in (table.title, *legend(table)))
    lines = [
        "% \\usepackage{booktabs}",
        "\\begin{table}[t]",
        "\\centering",
        f"\\caption{{{latex_text(caption)}.}}",
        f"\\begin{{tabular}}{{{'l' * len(table.headings)}{'c' * len(columns)}}}",
        "\\toprule",
        *_latex_heads(table.headings, columns),
        "\\midrule",
        *(f"{' & '.join(texts)} \\\\" for texts in body),
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_heads(headings: Sequence[str], columns: Sequence[Printed]) -> Iterator[str]:
    """Yield one line of headings, or two with rules between them where columns have a heading in common."""
    if any(column.above for column in columns):
        at, spans, rules = len(headings) + 1, [], []
        for above, members in groupby(columns, key=lambda column: column.above):
            width = len(list(members))
            spans.append(f"\\multicolumn{{{width}}}{{c}}{{{latex_text(above)}}}")
            rules += [f"\\cmidrule(lr){{{at}-{at + width - 1}}}"] if above else []
            at += width
        yield f"{' & '.join([*([''] * len(headings)), *spans])} \\\\".strip()
        yield " ".join(rules)
    texts = [*headings, *(column.below for column in columns)]
    yield f"{' & '.join(map_texts(texts, latex_text))} \\\\"


def as_rich(table: Table) -> Group:
    """Return the table for the terminal, its title above and its legend below.

    It has the width it needs: print it with crop=False, and a narrow terminal breaks lines, not numbers.
    """
    made = RichTable(box=SIMPLE_HEAD)
    for name in table.headings:
        made.add_column(escape(name), no_wrap=True)
    columns = printed_columns(table, TERMINAL)
    for column in columns:
        made.add_column(escape(_narrow_head(column)), justify="right", no_wrap=True)
    for index, row in enumerate(table.rows):
        made.add_row(*map_texts(row.names, escape), *(column.texts[index] for column in columns))
    made.width = Console(width=_UNLIMITED).measure(made).maximum
    return Group(Text(table.title, style="italic"), made, Text("; ".join(legend(table)), style="dim"))


def _narrow_head(column: Printed) -> str:
    """Return a column's headings broken into lines about as long as its cells."""
    width = max([_MIN_HEAD, *(Text.from_markup(text).cell_len for text in column.texts)])
    parts = [part for part in (column.above, column.below) if part]
    return "\n".join(
        line for part in parts for line in wrap(part, width, break_long_words=False, break_on_hyphens=False)
    )


def as_csv(table: Table) -> str:
    """Return one line a cell that holds anything, with all its numbers unrounded."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*table.headings, *_PLACE, *_NUMBERS])
    for row in table.rows:
        for cell in _filled_cells(table, row):
            writer.writerow([*row.names, *("" if value is None else value for value in cell.values())])
    return file.getvalue()


_PLACE = ("column", "target", "metric", "unit")
_NUMBERS = (
    *("mean", "std", "low", "high", "seeds", "unfinished", "complete", "paper", "paper_std"),
    *("difference", "difference_low", "difference_high", "p", "pairs"),
)


def _filled_cells(table: Table, row: Row) -> Iterator[dict[str, Any]]:
    """Yield the place and the numbers of every cell of a row that holds anything."""
    for column, cell in zip(table.columns, row.cells, strict=True):
        if cell.measured or cell.paper is not None:
            place = (column.group or column.heading, column.target, column.metric, column.measure.unit)
            yield dict(zip((*_PLACE, *_NUMBERS), (*place, *_numbers(cell)), strict=True))


def _numbers(cell: Cell) -> list[Any]:
    measured = asdict(cell.measured) if cell.measured else {}
    versus = asdict(cell.versus) if cell.versus else {}
    return [
        *(measured.get(name) for name in ("mean", "std", "low", "high", "count")),
        *((cell.unfinished, cell.complete) if measured else (None, None)),
        cell.paper,
        cell.paper_std,
        *(versus.get(name) for name in ("difference", "low", "high", "p", "count")),
    ]


def as_json(table: Table) -> str:
    """Return the whole table with all numbers unrounded; what is not a finite number is null."""
    rows = []
    for row in table.rows:
        names = dict(zip(table.headings, row.names, strict=True))
        rows.append({"label": row.label, "names": names, "cells": list(_filled_cells(table, row))})
    whole = {"title": table.title, "baseline": table.baseline, "legend": legend(table), "rows": rows}
    return json.dumps(finite_or_none(whole), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


TEXTS: dict[str, Callable[[Table], str]] = {
    "csv": as_csv,
    "md": as_markdown,
    "latex": as_latex,
    "json": as_json,
}
