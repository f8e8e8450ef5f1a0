"""`vicinal bench` for the terminal and its folder: the table, the goals, where the time goes, growth."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from vicinal.benchmarks.bench.goals import judge
from vicinal.benchmarks.bench.records import FILE, BenchRecord
from vicinal.report.bench_growth import growth_figure
from vicinal.report.bench_origin import command_of, origin_lines
from vicinal.report.bench_rows import HEADINGS, Row, goal_line, memory_line, profile_lines, sections
from vicinal.report.canvas import figure_png
from vicinal.report.formats import markdown_text
from vicinal.report.page import replace_text

PICTURE = "growth.png"
SMALLER = (
    "Smaller images, batches and, if quick, nets than the goals speak of: ratios tell, no goal is judged."
)
RANDOM = "Images and weights are random: no data set is read and nothing is downloaded."
COLUMNS = (
    "Times are medians over rounds in which all cases of a section run in turn, ratios medians over the same",
    "rounds, in brackets the lowest and the highest of them. The floor is an estimate from below, the larger",
    "of two: counted operations over the measured rate of large matrix products in the step's precision, and",
    "the bytes that these and the optimizer must move over the rate of a copy. Peak memory of a step is the",
    "most it takes on the GPU after warm-up and recording: net, gradients, optimizer, activations, and all",
    "memory that its recording keeps; scratch memory of cuBLAS is not in it. That of the loop and of streams",
    "is the most that tensors took from start to end, images included.",
)
PROFILED = (
    "Kernels are grouped by their names. Steps run slower while they are profiled: shares, waits too, are of",
    "the profiled step.",
)


def bench_tables(records: Sequence[BenchRecord]) -> list[Table]:
    """Return what a terminal shows: a table for each section, without the columns that say nothing there."""
    return [_section_table(heading, rows) for heading, rows in sections(records)]


def _section_table(heading: str, rows: Sequence[Row]) -> Table:
    title = escape(heading[0].upper() + heading[1:])
    table = Table(
        box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=(0, 1, 0, 0)
    )
    told = [
        number for number in range(len(HEADINGS)) if number == 0 or any(row.cells[number] for row in rows)
    ]
    for number in told:
        name = HEADINGS[number]
        table.add_column(name, justify="right" if name in ("Floor", "Times floor") else "left")
    for row in rows:
        table.add_row(*(escape(row.cells[number]) for number in told))
    return table


def notes(records: Sequence[BenchRecord]) -> list[str]:
    """Return what a reader must know of the run."""
    return [RANDOM] if all(record.judged for record in records) else [SMALLER, RANDOM]


def remarks(records: Sequence[BenchRecord]) -> list[str]:
    """Return what single records have to say: how they were made, and why one was not counted."""
    said = [f"{record.name}: {record.extra['note']}." for record in records if "note" in record.extra]
    uncounted = [record for record in records if "uncounted" in record.extra and not record.error]
    return said + [f"{record.name}: not counted ({record.extra['uncounted']})." for record in uncounted]


def write_bench(folder: Path, records: Sequence[BenchRecord]) -> None:
    """Write README.md, and the picture of growth where it was measured."""
    figure = growth_figure(records)
    if figure is not None:
        (folder / PICTURE).write_bytes(figure_png(figure))
    replace_text(folder / "README.md", readme(records, command_of(records, folder), figure is not None))


def readme(records: Sequence[BenchRecord], command: str, picture: bool) -> str:
    """Return the text of a folder: command, goals, table, where the time goes."""
    lines = ["# The cost of training and adaptation", "", "```", command, "```", ""]
    lines += [markdown_text(text) for text in (*notes(records), *origin_lines(records))]
    if any(record.part == "goals" for record in records):
        told = [*map(goal_line, judge(records)), memory_line(records)]
        lines += ["", "## Goals", "", *(f"- {markdown_text(line)}" for line in told)]
    lines += ["", "## Measured", "", *COLUMNS]
    for heading, rows in sections(records):
        lines += ["", markdown_text(heading[0].upper() + heading[1:]) + ":", ""]
        lines += [f"| {' | '.join(HEADINGS)} |", "|---|---|---|---|---:|---:|---|"]
        lines += [f"| {' | '.join(map(markdown_text, row.cells))} |" for row in rows]
    said = remarks(records)
    lines += ["", *(f"- {markdown_text(text)}" for text in said)] if said else []
    profiles = profile_lines(records)
    if profiles:
        lines += ["", "## Where the time goes", "", *PROFILED, ""]
        lines += [f"- {markdown_text(line)}" for line in profiles]
    if picture:
        lines += ["", "## How cost grows", "", f"![Time and memory against each axis]({PICTURE})"]
    return "\n".join([*lines, "", f"Every case with all its facts is in `{FILE}`.", ""])
