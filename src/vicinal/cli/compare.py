"""`vicinal compare`: every method on the same source models, over seeds."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vicinal.adapters.contract import METHODS
from vicinal.benchmarks.peers import PeersConfig, run_peers
from vicinal.cli.console import DataDir, Device, at_least_one, device_named, out, pairs
from vicinal.data.catalog import DATASETS
from vicinal.report.bars import Bars
from vicinal.report.page import write_report
from vicinal.report.tables import rich_table, summarise


def compare_command(
    data: Annotated[
        str, typer.Argument(help=f"{', '.join(DATASETS)}, a folder of domain folders, or a CSV.")
    ],
    methods: Annotated[str, typer.Option(help="Comma-separated, or all.")] = "all",
    seeds: Annotated[int, typer.Option(help="How many seeds, from 0 on.")] = 3,
    batch_size: Annotated[int, typer.Option(help="Images of a test-time batch.")] = 20,
    iterations: Annotated[int | None, typer.Option(help="Of training.")] = None,
    choose_images: Annotated[
        int, typer.Option(help="Images of each left-out stream on which rules and step sizes are chosen.")
    ] = 500,
    out_dir: Annotated[Path, typer.Option("--out", help="Models, records.jsonl and report.html.")] = Path(
        "comparison"
    ),
    workers: Annotated[int, typer.Option(help="Processes side by side; 0: one a core.")] = 0,
    device: Device = "cpu",
    data_dir: DataDir = None,
    data_option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of a named data set.")] = None,
) -> None:
    """Train source models over seeds, choose step sizes on left-out source domains, measure every method.

    Goes on where it was stopped: models and records that are there are not made again.
    """
    names = () if methods == "all" else tuple(name.strip() for name in methods.split(",") if name.strip())
    for name in names:
        METHODS[name]
    training: dict[str, Any] = {} if iterations is None else {"iterations": iterations}
    config = PeersConfig(
        data=data,
        out=out_dir,
        methods=names,
        seeds=tuple(range(at_least_one(seeds, "--seeds"))),
        batch_size=at_least_one(batch_size, "--batch-size"),
        workers=workers,
        device=device_named(device),
        data_dir=data_dir,
        data_options=pairs(data_option or (), "--data-option"),
        training=training,
        out_of_fold={"stream_images": at_least_one(choose_images, "--choose-images")},
    )
    with Bars(out) as bars:
        records = run_peers(config, lambda stage, done, total: bars.count(stage, data, done, total))
    notes = ["Step sizes of all methods: chosen on streams of left-out source domains, never on targets."]
    write_report(records, [], out_dir / "report.html", f"vicinal compare: {data}", notes)
    out.print(rich_table(summarise(records)))
    out.print(f"{len(records)} records in {out_dir / 'records.jsonl'}, the page in {out_dir / 'report.html'}")
