"""`vicinal bench`: what training and adaptation cost, against plain PyTorch and the arithmetic floor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from vicinal.benchmarks.bench.machine import device_name
from vicinal.benchmarks.bench.records import PARTS, SECTIONS, BenchRecord, Ledger, Place, read_bench
from vicinal.benchmarks.bench.run import Bench
from vicinal.benchmarks.bench.scale import Scale, scale_for
from vicinal.cli.console import Device, device_named, out, say
from vicinal.errors import ConfigError, DataError, UnknownNameError
from vicinal.report.bench import bench_tables, notes, write_bench
from vicinal.report.bench_origin import origin_lines
from vicinal.report.bench_rows import memory_line, profile_lines
from vicinal.versions import versions


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
        bool,
        typer.Option(
            "--show", help="Measure nothing: print the records in --out, write README.md and growth.png anew."
        ),
    ] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="records.jsonl, README.md and growth.png.")] = Path(
        "bench"
    ),
) -> None:
    """Time vicinal's own steps and plain PyTorch's in turn; print ratios, floors, memory and goals.

    Random images and weights: needs no data and downloads nothing. On a CPU it runs smaller. Exit code 1 if a
    case failed; a goal that is missed is no failure.
    """
    if show and only:
        raise ConfigError("--show prints all records of --out: leave --only away")
    records = read_bench(out_dir, say) if show else _measure(device, quick, tuple(only or PARTS), out_dir)
    if not records:
        raise DataError(f"{out_dir} holds no records: run vicinal bench --out {out_dir}")
    write_bench(out_dir, records)
    out.print(*bench_tables(records), sep="\n")
    for line in (memory_line(records), *profile_lines(records), *notes(records), *origin_lines(records)):
        say(line)
    say(f"{len(records)} records and a README in {out_dir}")
    if any(record.error for record in records):
        raise typer.Exit(1)


def _measure(device: str, quick: bool, parts: Sequence[str], out_dir: Path) -> list[BenchRecord]:
    """Measure the parts asked for and return all records of the folder."""
    place = torch.device(device_named(device))
    scale = scale_for(place.type, quick)
    _check(parts, scale)
    made_by = Place(device_name(place), scale.name, versions()["torch"])
    ledger = Ledger(out_dir, parts, made_by, say)
    with out.status("starting") as status:
        tell = status.update if out.is_terminal else say  # a log keeps what a terminal overwrites
        Bench(scale, place, ledger.replace, tell).run(parts)
    ledger.finish()
    return ledger.records


def _check(parts: Sequence[str], scale: Scale) -> None:
    """Refuse names that nobody knows and sections without a case at this size."""
    for part in parts:
        if part not in (*PARTS, *SECTIONS):
            raise UnknownNameError("part", part, (*PARTS, *SECTIONS))
        if not scale.measures(part):
            raise ConfigError(f"'{part}' has no cases at the scale '{scale.name}': only a full run has some")
