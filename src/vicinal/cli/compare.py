"""`vicinal compare`: every method on the same source models, over seeds."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vicinal.adapters.methods import METHODS
from vicinal.benchmarks.peers import Comparison, comparison_spec
from vicinal.benchmarks.place import Place
from vicinal.benchmarks.plan import plan
from vicinal.benchmarks.run import devices_for, missing_data, records_of, run_plan
from vicinal.benchmarks.store import Store
from vicinal.cli.console import DataDir, Device, at_least_one, device_named, names_in, out, pairs, ready, say
from vicinal.cli.reproduce import notes_of
from vicinal.data.catalog import DATASETS
from vicinal.errors import DataError
from vicinal.report.bars import Bars
from vicinal.report.page import write_report
from vicinal.report.tables import rich_table, summarise


def compare_command(
    data: Annotated[
        str, typer.Argument(help=f"{', '.join(DATASETS)}, a folder of domain folders, or a CSV.")
    ],
    methods: Annotated[str, typer.Option(help="Comma-separated, or all.")] = "all",
    target: Annotated[list[str] | None, typer.Option(help="Domain to hold out; may be given again.")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds, from 0 on.")] = 3,
    batch_size: Annotated[int, typer.Option(help="Images of a test-time batch.")] = 20,
    iterations: Annotated[int | None, typer.Option(help="Of training.")] = None,
    choose_images: Annotated[
        int, typer.Option(help="Images of each left-out stream on which rules and step sizes are chosen.")
    ] = 500,
    out_dir: Annotated[Path, typer.Option("--out", help="Models, records.jsonl and report.html.")] = Path(
        "comparison"
    ),
    workers: Annotated[int, typer.Option(help="Processes side by side; 0: one a core, or one a GPU.")] = 0,
    device: Device = "cpu",
    data_dir: DataDir = None,
    data_option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of a named data set.")] = None,
) -> None:
    """Train source models over seeds, choose step sizes on left-out source domains, measure every method.

    Goes on where it was stopped: models and records that are there are not made again.
    """
    names = () if methods == "all" else tuple(names_in(methods))
    for name in names:
        METHODS[name]
    training: dict[str, Any] = {} if iterations is None else {"iterations": iterations}
    spec = comparison_spec(
        Comparison(
            data=data,
            methods=names,
            targets=tuple(target or ()),
            seeds=at_least_one(seeds, "--seeds"),
            batch_size=at_least_one(batch_size, "--batch-size"),
            data_options=pairs(data_option or (), "--data-option"),
            training=training,
            out_of_fold={"stream_images": at_least_one(choose_images, "--choose-images")},
        )
    )
    whole, place = plan(spec), Place(ready(out_dir), data_dir)
    for missing in missing_data(whole, data_dir):
        raise DataError(f"{missing.data} was not found: {missing.how}")
    with Bars(out) as bars:
        failures = run_plan(whole, place, devices_for(device_named(device), workers), bars.count)
    records = records_of(whole, Store(out_dir))
    if not records:
        raise DataError(f"nothing was measured: {failures[0].why}")
    write_report(records, [], out_dir / "report.html", f"vicinal compare: {data}", [spec.note])
    out.print(rich_table(summarise(records)))
    for note in notes_of([], failures):
        say(note, style="red")
    say(f"{len(records)} records in {out_dir / 'records.jsonl'}, the page in {out_dir / 'report.html'}")
    if failures:
        raise typer.Exit(1)
