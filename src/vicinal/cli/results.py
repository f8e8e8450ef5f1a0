"""`vicinal results`: filter, aggregate and export any records."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vicinal.benchmarks.metric import METRICS
from vicinal.benchmarks.spec import ACCURACY, Spec, load_spec
from vicinal.cli.console import out, say
from vicinal.errors import ConfigError, DataError, UnknownNameError
from vicinal.evaluation.record import Record
from vicinal.report.board import spec_of
from vicinal.report.export import Table, results_table, spec_table
from vicinal.report.formats import TEXTS, as_rich
from vicinal.report.select import read_all, where

TERMINAL = "table"
FORMATS = (TERMINAL, *TEXTS)
FILE_WIDTH = 120  # of the words around a table in a text file
SUFFIXES = {".csv": "csv", ".md": "md", ".tex": "latex", ".json": "json", ".txt": TERMINAL, "": TERMINAL}


def results_command(
    paths: Annotated[list[Path], typer.Argument(help="Folders with records.jsonl or .gz, or such files.")],
    filters: Annotated[
        list[str] | None,
        typer.Option("--where", help="NAME=VALUE or NAME=ONE,OTHER, as method=vnl,soft; again for more."),
    ] = None,
    by: Annotated[
        str,
        typer.Option(help="What makes a row, as method,statistics; default: all that must be told apart."),
    ] = "",
    metric: Annotated[str | None, typer.Option(help=f"{', '.join(METRICS)}; default: {ACCURACY}.")] = None,
    per_target: Annotated[bool, typer.Option("--per-target", help="A column for every target.")] = False,
    baseline: Annotated[
        str | None, typer.Option(help="The row to compare with, by its label: difference and p.")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="The benchmark's own table, with the paper's figures beside ours.")
    ] = False,
    spec: Annotated[
        str | None,
        typer.Option(help="With --paper: the benchmark, or its .toml file; default: what the records say."),
    ] = None,
    format_name: Annotated[
        str | None,
        typer.Option("--format", help=f"{', '.join(FORMATS)}; default: as --out ends, else table."),
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write to this file instead.")] = None,
) -> None:
    """Show measured results as a table, or export them: mean and spread over seeds, any filter and grouping.

    Names are those of a record (dataset, target, backbone, algorithm, method, statistics, predict, stream,
    seed, batch_size), of a benchmark (spec, setting, row), of the adapter's options (lr, steps, ...), or a
    path of the protocol such as training.train.iterations.
    """
    kind = _format(format_name, out_file)
    records = where(read_all(paths), _filters(filters or ()))
    names = [name.strip() for name in by.split(",") if name.strip()]
    if spec is not None and not paper:
        raise ConfigError("--spec says whose table --paper shows: give both")
    if paper:
        if names or metric is not None:
            raise ConfigError(
                "--paper shows the benchmark's own rows and metric: leave out --by and --metric"
            )
        table = spec_table(_benchmark(spec, records), records, per_target=per_target, baseline=baseline)
    else:
        table = results_table(
            records, by=names, metric=metric or ACCURACY, per_target=per_target, baseline=baseline
        )
    if out_file is not None:
        out_file.parent.mkdir(parents=True, exist_ok=True)
        out_file.write_text(_plain(table) if kind == TERMINAL else TEXTS[kind](table), encoding="utf-8")
        say(f"{len(records)} records, {len(table.rows)} rows in {out_file}")
    elif kind == TERMINAL:
        out.print(as_rich(table), crop=False)
    else:
        typer.echo(TEXTS[kind](table), nl=False)


def _benchmark(spec: str | None, records: Sequence[Record]) -> Spec:
    found = load_spec(spec) if spec is not None else spec_of(records)
    if found is None:
        raise DataError("the paper's figures need records of a benchmark, and these are of none")
    return found


def _format(name: str | None, file: Path | None) -> str:
    if name is None and file is not None:
        if file.suffix.lower() not in SUFFIXES:
            known = ", ".join(suffix for suffix in SUFFIXES if suffix)
            raise ConfigError(f"--out {file}: its suffix is none of {known}: say with --format what to write")
        return SUFFIXES[file.suffix.lower()]
    if name is None:
        return TERMINAL
    if name not in FORMATS:
        raise UnknownNameError("format", name, FORMATS)
    return name


def _filters(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the texts of each name; a name given again allows more values."""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not name.strip() or not sign or not value.strip():
            raise ConfigError(f"--where takes NAME=VALUE, not '{text}'")
        found.setdefault(name.strip(), []).append(value.strip())
    return found


def _plain(table: Table) -> str:
    file = io.StringIO()
    Console(file=file, width=FILE_WIDTH).print(as_rich(table), crop=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
