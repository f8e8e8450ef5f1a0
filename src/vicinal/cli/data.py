"""`vicinal data`: what data sets there are, which are here, how to get the others, whether they are sound."""

from typing import Annotated

import typer

from vicinal.cli.console import DataDir, list_bad, out, say
from vicinal.data.catalog import DATASETS
from vicinal.data.check import check as check_dataset
from vicinal.data.find import data_dirs, how_to_get
from vicinal.data.find import status as status_of
from vicinal.data.get import get_dataset
from vicinal.report.bars import Bars
from vicinal.report.datasets import catalog_table, check_table, status_table

app = typer.Typer(
    help="Data sets: what there is, what is here, getting and checking them.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help=f"{', '.join(DATASETS)}.")]


@app.command("list")
def list_command() -> None:
    """Show every data set known by name: size, domains, classes, where it comes from, licence."""
    out.print(catalog_table(DATASETS[name] for name in DATASETS))
    for name in DATASETS:
        if DATASETS[name].note:
            say(f"{name}: {DATASETS[name].note}", style="dim")


@app.command("status")
def status_command(
    names: Annotated[list[str] | None, typer.Argument(help="Default: all of them.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Show which data sets are found, incomplete or missing, and what to put where."""
    dirs = data_dirs(data_dir)
    statuses = [status_of(DATASETS[name], dirs) for name in (names or list(DATASETS))]
    out.print(status_table(statuses))
    for status in statuses:
        for note in status.notes:
            say(f"{status.entry.name}: {note}")
        if status.state == "missing":
            say(f"{status.entry.name}: {how_to_get(status.entry, dirs[0])}")


@app.command("get")
def get_command(name: Name, data_dir: DataDir = None) -> None:
    """Download a data set: several addresses, resumed where it stopped, checked, unpacked."""
    entry, dirs = DATASETS[name], data_dirs(data_dir)
    with Bars(out) as bars:
        folder = get_dataset(
            entry,
            dirs[0],
            lambda file, done, total: bars.count("get", file, done, total or 0),
            others=dirs[1:],
        )
    there = f"in {folder}" if folder else "already there"
    say(f"{name} is {there}")
    out.print(status_table([status_of(entry, dirs)]))


@app.command("check")
def check_command(
    name: Annotated[str, typer.Argument(help="A name, a folder of domains, or a CSV.")],
    data_dir: DataDir = None,
) -> None:
    """Decode every image, report the bad ones, compare all counts with the catalog; exit 1 if any differ."""
    with Bars(out) as bars:
        found = check_dataset(name, data_dir, lambda done, total: bars.count("check", name, done, total))
    out.print(check_table(found))
    say(f"split: {found.split}")
    for note in found.notes:
        say(note)
    list_bad(found.bad, "unreadable images:")
    say("sound" if found.sound else "not sound: see above", style="green" if found.sound else "red")
    if not found.sound:
        raise typer.Exit(1)
