"""`vicinal report`: a page from the records of a folder."""

from pathlib import Path
from typing import Annotated

import typer

from vicinal.benchmarks.spec import load_spec
from vicinal.cli.console import say
from vicinal.report.benchmark import FIGURES, PAGE, write_benchmark
from vicinal.report.board import spec_of
from vicinal.report.select import read_all


def report_command(
    path: Annotated[
        Path, typer.Argument(help="A folder with records.jsonl or records.jsonl.gz, or such a file.")
    ],
    spec: Annotated[
        str | None,
        typer.Option(help="The benchmark of the records, or its .toml file; default: what they say."),
    ] = None,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="The page without figures/, and without links to them.")
    ] = False,
) -> None:
    """Make report.html and figures/ beside the records of a benchmark or of any other runs."""
    records, folder = read_all([path]), path if path.is_dir() else path.parent
    found = load_spec(spec) if spec is not None else spec_of(records)
    write_benchmark(found, records, folder, page_only=page_only)
    what = "records" if found is None else f"records of {found.name}"
    figures = "" if page_only else f", its figures in {folder / FIGURES}"
    say(f"{len(records)} {what}: the page in {folder / PAGE}{figures}")
