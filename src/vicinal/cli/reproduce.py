"""`vicinal reproduce`: a table of the paper, trained, measured and set beside the paper's figures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from vicinal.benchmarks.estimate import Estimate, estimate, needed_weights
from vicinal.benchmarks.jobs import TeachJob
from vicinal.benchmarks.place import CHOICE, STEP_SIZES, TAUGHT, Place
from vicinal.benchmarks.plan import Plan, plan
from vicinal.benchmarks.run import (
    Missing,
    devices_for,
    missing_data,
    records_of,
    run_plans,
    without_data,
)
from vicinal.benchmarks.schedule import Failure
from vicinal.benchmarks.spec import SUFFIX, Spec, load_spec, spec_names
from vicinal.benchmarks.store import Store, result_of
from vicinal.cli.console import DataDir, Device, at_least_one, device_named, out, say
from vicinal.report.bars import Bars
from vicinal.report.benchmark import write_benchmark
from vicinal.report.reproduced import QUICK, WORDS, expectations_of, results_rich, write_readme


@dataclass(frozen=True)
class Limits:
    """What of a spec to run, and how to write that down again."""

    only: tuple[str, ...] = ()
    seeds: int | None = None
    quick: bool = False
    backbone: str | None = None
    weights: str | None = None
    iterations: int | None = None

    def command(self, name: str) -> str:
        """Return the command that asks for the same."""
        words = ["vicinal", "reproduce", name]
        words += [f"--only {_quoted(word)}" for word in self.only]
        words += [f"--seeds {self.seeds}"] if self.seeds else []
        words += ["--quick"] if self.quick else []
        words += [f"--iterations {self.iterations}"] if self.iterations else []
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
            iterations=self.iterations,
        )


@dataclass(frozen=True)
class Asked:
    """A table to run: its spec, all its runs, where they go, and the data that are not here."""

    spec: Spec
    whole: Plan
    place: Place
    missing: tuple[Missing, ...]
    command: str

    @property
    def left(self) -> Plan:
        """The runs whose data are here."""
        return without_data(self.whole, self.missing)


def _table(name: str, limits: Limits, out_dir: Path | None, data_dir: Path | None, several: bool) -> Asked:
    spec = load_spec(name)
    folder = spec.name + ("-quick" if limits.quick else "")
    whole = limits.plan(spec)
    chosen = out_dir if out_dir and not several else (out_dir or Path("results")) / folder
    command = limits.command(name if name.endswith(SUFFIX) else spec.name)
    return Asked(spec, whole, Place(chosen, data_dir), tuple(missing_data(whole, data_dir)), command)


def reproduce_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Tables of the paper (see --list), or specs of your own, .toml files.", metavar="[NAME]..."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show every table there is.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="A column, data set, row, source training or method; again: these too."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, from 0 on; default: the spec's.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Hardly any training: only to see that it runs.")
    ] = False,
    backbone: Annotated[str | None, typer.Option(help="Another backbone for every column.")] = None,
    weights: Annotated[str | None, typer.Option(help="Its weights: timm, none or a file.")] = None,
    iterations: Annotated[
        int | None, typer.Option(help="Of every training; default: the spec's. Fewer is cheaper and worse.")
    ] = None,
    teach: Annotated[
        bool,
        typer.Option(
            "--teach",
            help="Train left-out models and choose on them, nothing else. The choices are kept in models/*, "
            "taught.safetensors, choice.json and step_sizes: small files for another machine to go on with.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, how long it takes and what is missing.")
    ] = False,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Default: results/NAME. Of several tables: DIR/NAME each.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes side by side; 0: one a core, or one a GPU.")] = 0,
    device: Device = "auto",
    data_dir: DataDir = None,
) -> None:
    """Train and measure what tables of the paper need; print the paper's figures beside ours.

    Goes on where it was stopped, by whatever: models and records that are there are not made again. Without
    some data set the rest is run, and the exit code is 1.
    """
    if show or not names:
        _list()
        return
    count = None if seeds is None else at_least_one(seeds, "--seeds")
    length = None if iterations is None else at_least_one(iterations, "--iterations")
    limits = Limits(tuple(only or ()), count, quick, backbone, weights, length)
    tables = [_table(name, limits, out_dir, data_dir, len(names) > 1) for name in dict.fromkeys(names)]
    devices = devices_for(device_named(device, elsewhere=dry_run), workers)
    if dry_run:
        for table in tables:
            _show_plan(table, devices, teach)
        return
    with Bars(out) as bars:
        failures = run_plans([(t.left, t.place) for t in tables], devices, bars.count, teach=teach)
    for table in tables:
        mine = {run.key for run in table.whole.measures}
        if teach:
            _say_taught(table)
        else:
            _report(table, [failure for failure in failures if mine & failure.keys])
    notes = notes_of(dict.fromkeys(item for table in tables for item in table.missing), failures)
    for note in notes:
        say(note, style="red")
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


def _show_plan(asked: Asked, devices: Sequence[str], teach: bool) -> None:
    """Print what a run would do."""
    spec, whole, place = asked.spec, asked.whole, asked.place
    kind = devices[0].partition(":")[0]
    found = estimate(whole, place, kind, frozenset(Store(place.out).done()), teach=teach)
    say(f"{spec.name}: {spec.title} ({spec.paper})")
    table = Table(box=SIMPLE_HEAD)
    for heading in ("Column", "Data", "Source models", "Records"):
        table.add_column(heading, justify="left" if heading in ("Column", "Data") else "right")
    data = {run.key: run.request.data for run in whole.trainings}
    for column in dict.fromkeys(run.setting for run in whole.measures):
        mine = [run for run in whole.measures if run.setting == column]
        models = {run.model for run in mine}
        results = sum(len(run.results) for run in mine)
        table.add_row(escape(column), escape(data[mine[0].model]), str(len(models)), str(results))
    out.print(table)
    for line in _left(found, len(devices), kind):
        say(line)
    for weights in needed_weights(whole):
        say(f"pretrained weights: {weights}")
    for note in notes_of(asked.missing, []):
        say(note, style="red")


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


def notes_of(missing: Iterable[Missing], failures: Sequence[Failure]) -> list[str]:
    """Return what is missing, a line for each reason."""
    lines = [f"missing data: {item.data}: {item.how}" for item in missing]
    for why in dict.fromkeys(failure.why for failure in failures):
        same = [failure for failure in failures if failure.why == why]
        lost = sum(len(failure.keys) for failure in same)
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        with_it = f" ({lost} measurements)" if lost else ""
        lines.append(f"not done: {same[0].what}{more}{with_it}: {why}")
    return lines


def _say_taught(asked: Asked) -> None:
    """Print for how many source models it is there what left-out domains taught."""
    runs = [run for run in asked.whole.trainings if run.request.out_of_fold is not None]
    taught = sum(TeachJob(run, asked.place).done for run in runs)
    files = f"{TAUGHT}, {CHOICE} and {STEP_SIZES} in {asked.place.out / 'models'}/*"
    say(f"left-out domains taught for {taught} of {len(runs)} source models: {files}")


def _report(asked: Asked, failures: Sequence[Failure]) -> None:
    """Print the table and what was expected; write README, page and figures."""
    spec, folder = asked.spec, asked.place.out
    records = records_of(asked.whole, Store(folder))
    if not records:
        return
    write_benchmark(spec, records, folder)
    write_readme(spec, records, folder, asked.command, notes_of(asked.missing, failures))
    out.print(results_rich(spec, records))
    expected = expectations_of(spec, records)
    for one in expected:
        if one.met is not None:
            style = "green" if one.met else "red"
            say(f"{WORDS[one.met]}: {one.what}: {one.found}", style=style)
    if unmeasured := sum(one.met is None for one in expected):
        say(f"{unmeasured} more expectations were not measured", style="dim")
    if records[0].protocol["benchmark"]["quick"]:
        say(QUICK, style="yellow")
    runs = len({result_of(record) for record in records})  # columns may share them
    say(f"{runs} records, README.md, report.html and figures in {folder}")


def _quoted(text: str) -> str:
    return f"'{text}'" if set(text) & set(" (),'") else text
