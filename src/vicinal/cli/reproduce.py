"""`vicinal reproduce`: a table of the paper, trained, measured and set beside the paper's figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from vicinal.benchmarks.estimate import Estimate, estimate, needed_weights
from vicinal.benchmarks.jobs import Place
from vicinal.benchmarks.plan import Plan, plan
from vicinal.benchmarks.run import (
    Missing,
    devices_for,
    missing_data,
    records_of,
    run_plan,
    without_data,
)
from vicinal.benchmarks.schedule import Failure
from vicinal.benchmarks.spec import SUFFIX, Spec, load_spec, spec_names
from vicinal.benchmarks.store import Store
from vicinal.cli.console import DataDir, Device, at_least_one, device_named, out
from vicinal.evaluation.record import Record
from vicinal.report.bars import Bars
from vicinal.report.benchmark import write_benchmark
from vicinal.report.reproduced import QUICK, WORDS, expectations_of, results_rich, write_readme


@dataclass(frozen=True)
class Asked:
    """What of a spec to run, and how to write that down again."""

    name: str
    only: tuple[str, ...] = ()
    seeds: int | None = None
    quick: bool = False
    backbone: str | None = None
    weights: str | None = None

    @property
    def command(self) -> str:
        """The command that asks for the same."""
        words = ["vicinal", "reproduce", self.name]
        words += [f"--only {_quoted(word)}" for word in self.only]
        words += [f"--seeds {self.seeds}"] if self.seeds else []
        words += ["--quick"] if self.quick else []
        words += [f"--backbone {self.backbone}"] if self.backbone else []
        return " ".join(words + ([f"--weights {self.weights}"] if self.weights else []))

    def plan(self, spec: Spec) -> Plan:
        """Return all runs asked for, done or not."""
        return plan(
            spec,
            only=self.only,
            seeds=self.seeds,
            quick=self.quick,
            backbone=self.backbone,
            weights=self.weights,
        )


def reproduce_command(
    name: Annotated[
        str | None,
        typer.Argument(help="A table of the paper (see --list), or a spec of your own, a .toml file."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show every table there is.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="A column, data set or row by its name; may be given again.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, from 0 on; default: the spec's.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Hardly any training: only to see that it runs.")
    ] = False,
    backbone: Annotated[str | None, typer.Option(help="Another backbone for every column.")] = None,
    weights: Annotated[str | None, typer.Option(help="Its weights: timm, none or a file.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, how long it takes and what is missing.")
    ] = False,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Default: results/NAME.")] = None,
    workers: Annotated[int, typer.Option(help="Processes side by side; 0: one a core, or one a GPU.")] = 0,
    device: Device = "auto",
    data_dir: DataDir = None,
) -> None:
    """Train and measure what a table of the paper needs; print the paper's figures beside ours.

    Goes on where it was stopped, by whatever: models and records that are there are not made again. Without
    some data set the rest is run, and the exit code is 1.
    """
    if show or name is None:
        _list()
        return
    spec = load_spec(name)
    asked = Asked(
        name if name.endswith(SUFFIX) else spec.name,
        tuple(only or ()),
        None if seeds is None else at_least_one(seeds, "--seeds"),
        quick,
        backbone,
        weights,
    )
    place = Place(out_dir or Path("results") / (spec.name + ("-quick" if quick else "")), data_dir)
    whole = asked.plan(spec)
    missing = missing_data(whole, data_dir)
    devices = devices_for(device_named(device), workers)
    if dry_run:
        _show_plan(spec, whole, place, devices, missing)
        return
    with Bars(out) as bars:
        failures = run_plan(without_data(whole, missing), place, devices, bars.count)
    records = records_of(whole, Store(place.out))
    notes = notes_of(missing, failures)
    if records:
        _report(spec, records, place.out, asked.command, notes)
    for note in notes:
        out.print(note, style="red", markup=False, highlight=False)
    if notes:
        raise typer.Exit(1)


def _list() -> None:
    table = Table(box=SIMPLE_HEAD)
    for heading in ("Name", "What", "In the paper", "Data"):
        table.add_column(heading)
    for spec in map(load_spec, spec_names()):
        names = ", ".join((spec.name, *spec.aliases))
        data = ", ".join(dict.fromkeys(setting.data for setting in spec.settings))
        table.add_row(*map(escape, (names, spec.title, spec.paper, data)))
    out.print(table)


def _show_plan(
    spec: Spec, whole: Plan, place: Place, devices: Sequence[str], missing: Sequence[Missing]
) -> None:
    """Print what a run would do."""
    kind = devices[0].partition(":")[0]
    found = estimate(whole, place, kind, frozenset(Store(place.out).done()))
    out.print(f"{spec.name}: {spec.title} ({spec.paper})", highlight=False, markup=False)
    table = Table(box=SIMPLE_HEAD)
    for heading in ("Column", "Data", "Source models", "Records"):
        table.add_column(heading, justify="left" if heading in ("Column", "Data") else "right")
    data = {run.key: run.request.data for run in whole.trainings}
    for column in dict.fromkeys(run.setting for run in whole.measures):
        mine = [run for run in whole.measures if run.setting == column]
        models = {run.model for run in mine}
        results = sum(len(run.results) for run in mine)
        table.add_row(escape(column), data[mine[0].model], str(len(models)), str(results))
    out.print(table)
    for line in _left(found, len(devices), kind):
        out.print(line, highlight=False, markup=False)
    for weights in needed_weights(whole):
        out.print(f"pretrained weights: {weights}", highlight=False, markup=False)
    for note in notes_of(missing, []):
        out.print(note, style="red", highlight=False, markup=False)


def _left(found: Estimate, workers: int, kind: str) -> list[str]:
    """Return what is left to do and what it takes, in words."""
    what = (
        f"{found.trainings} trainings with {found.left_out} left-out models, {found.step_sizes} step sizes "
    )
    what += f"to choose, {found.measurements} measurements"
    who = f"{workers} workers" if workers > 1 else "one worker"
    takes = (
        f"{duration(found.wall(workers))} with {who} ({kind}), {found.memory / 2**30:.1f} GiB of memory each"
    )
    return [
        f"left to do: {what}",
        f"estimated, not measured: {takes}, {found.disk / 2**30:.1f} GiB of models on disk",
    ]


def duration(seconds: float) -> str:
    """Return a time in one unit that fits it."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1.0, seconds):.0f} seconds"


def notes_of(missing: Sequence[Missing], failures: Sequence[Failure]) -> list[str]:
    """Return what is missing, a line for each reason."""
    lines = [f"missing data: {item.data}: {item.how}" for item in missing]
    for why in dict.fromkeys(failure.why for failure in failures):
        same = [failure for failure in failures if failure.why == why]
        lost = sum(failure.measurements for failure in same)
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        lines.append(f"not done: {same[0].what}{more} ({lost} measurements): {why}")
    return lines


def _report(spec: Spec, records: Sequence[Record], folder: Path, command: str, notes: Sequence[str]) -> None:
    """Print the table and what was expected; write README, page and figures."""
    write_benchmark(spec, records, folder)
    write_readme(spec, records, folder, command, notes)
    out.print(results_rich(spec, records))
    for one in expectations_of(spec, records):
        style = {True: "green", False: "red", None: "dim"}[one.met]
        out.print(f"{WORDS[one.met]}: {one.what}: {one.found}", style=style, markup=False, highlight=False)
    if records[0].protocol["benchmark"]["quick"]:
        out.print(QUICK, style="yellow")
    out.print(f"{len(records)} records, README.md, report.html and figures in {folder}", highlight=False)


def _quoted(text: str) -> str:
    return f"'{text}'" if set(text) & set(" (),'") else text
