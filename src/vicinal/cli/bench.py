"""`vicinal bench`: what training and adaptation cost, against plain PyTorch and the arithmetic floor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from vicinal.benchmarks.bench.records import PARTS, SECTIONS, BenchRecord, Ledger, read_bench
from vicinal.benchmarks.bench.run import Bench, device_name
from vicinal.benchmarks.bench.scale import scale_for
from vicinal.cli.console import Device, device_named, out
from vicinal.errors import DataError, UnknownNameError
from vicinal.report.bench import bench_tables, notes, write_bench
from vicinal.report.bench_rows import memory_line, profile_lines


def bench_command(
    device: Device = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny net and tiny images: only to see that it runs.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(PARTS)}, or a section of the goals: {', '.join(SECTIONS)}; may be given again. "
            "Default: all."
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Measure nothing: print and write up the records in --out.")
    ] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="records.jsonl, README.md and growth.png.")] = Path(
        "bench"
    ),
) -> None:
    """Time vicinal's own steps and plain PyTorch's in turn; print ratios, floors, memory and goals.

    Random images and weights: needs no data and downloads nothing. On a CPU it runs smaller. Exit code 1 if a
    case failed; a goal that is missed is no failure.
    """
    records = read_bench(out_dir) if show else _measure(device, quick, tuple(only or PARTS), out_dir)
    if not records:
        raise DataError(f"{out_dir} holds no records: run vicinal bench --out {out_dir}")
    write_bench(out_dir, records)
    out.print(*bench_tables(records), sep="\n")
    for line in (memory_line(records), *profile_lines(records), *notes(records)):
        out.print(line, markup=False, highlight=False)
    out.print(f"{len(records)} records and a README in {out_dir}", markup=False, highlight=False)
    if any(record.error for record in records):
        raise typer.Exit(1)


def _measure(device: str, quick: bool, parts: Sequence[str], out_dir: Path) -> list[BenchRecord]:
    """Measure the parts asked for and return all records of the folder."""
    for part in parts:
        if part not in (*PARTS, *SECTIONS):
            raise UnknownNameError("part", part, (*PARTS, *SECTIONS))
    place = torch.device(device_named(device))
    scale = scale_for(place.type, quick)
    ledger = Ledger(out_dir, parts, scale.name, device_name(place))
    with out.status("starting") as status:
        say = status.update if out.is_terminal else out.print  # a log keeps what a terminal overwrites
        Bench(scale, place, ledger.add, say).run(parts)
    return ledger.records
