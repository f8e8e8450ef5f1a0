"""`vicinal bench`: what training and adaptation cost, against plain PyTorch and the arithmetic floor."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from vicinal.benchmarks.bench.records import PARTS, Ledger
from vicinal.benchmarks.bench.run import Bench, device_name
from vicinal.benchmarks.bench.scale import scale_for
from vicinal.cli.console import Device, device_named, out
from vicinal.errors import UnknownNameError
from vicinal.report.bench import bench_table, notes, write_bench
from vicinal.report.bench_rows import profile_lines


def bench_command(
    device: Device = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny net and tiny images: only to see that it runs.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(PARTS)}; may be given again. Default: all.")
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="records.jsonl, README.md and growth.png.")] = Path(
        "bench"
    ),
) -> None:
    """Time vicinal's own steps and plain PyTorch's in turn; print ratios, floors, memory and goals.

    Random images and weights: needs no data and downloads nothing. On a CPU it runs smaller. Exit code 1 if a
    case failed; a goal that is missed is no failure.
    """
    parts = tuple(dict.fromkeys(only or PARTS))
    for part in parts:
        if part not in PARTS:
            raise UnknownNameError("part", part, PARTS)
    place = torch.device(device_named(device))
    scale = scale_for(place.type, quick)
    ledger = Ledger(out_dir, parts, scale.name, device_name(place))
    with out.status("starting") as status:
        Bench(scale, place, ledger.add, status.update).run(parts)
    words = ["vicinal bench", f"--device {place.type}", *(["--quick"] if quick else [])]
    write_bench(out_dir, ledger.records, " ".join([*words, f"--out {out_dir}"]))
    out.print(bench_table(ledger.records))
    for line in (*profile_lines(ledger.records), *notes(ledger.records)):
        out.print(line, markup=False, highlight=False)
    out.print(f"{len(ledger.records)} records, a README and plots in {out_dir}", markup=False)
    failed = [record for record in ledger.records if record.error]
    if failed:
        raise typer.Exit(1)
