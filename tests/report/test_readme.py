"""The figures of the README are those of the records that it links to."""

import re
from functools import cache
from pathlib import Path

import pytest

from vicinal.benchmarks.spec import load_spec
from vicinal.report.export import Cell, Table, results_table, spec_table
from vicinal.report.select import read_all, where

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

DIGITS = {  # method, statistics, and of what step sizes the best is shown
    "ERM, not adapted": ("erm", "source"),
    "no update": ("bn", "batch"),
    "hard pseudo labels": ("hard", "stream"),
    "entropy minimisation": ("soft", "stream"),
    "out-of-fold neighbor labels": ("labels", "stream"),
    "vnl": ("vnl", "stream"),
}
PACS = {
    "ERM, not adapted": "ERM baseline",
    "stream statistics, no update": "Stream statistics, meta-trained",
    "best other on batch statistics": "Tent, meta-trained",
    "best other on stream statistics": "SHOT-IM, stream statistics, meta-trained",
    "entropy minimisation on the schedule": "Soft pseudo label, stream statistics, steps as ours, "
    "meta-trained",
    "the same with the votes": "vnl, entropy alone",
    "the paper's rule": "This paper, as published",
    "`vnl`, one round of votes": "vnl, one round of votes",
    "vnl, votes in three rounds": "vnl",
}
ROTATED = ("rotated", "rotated", "complex_scenarios", "shift_extent")
PAPER, OURS = "This paper, as published", "This paper"

pytestmark = pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="not a checkout")


def lines_of(heading: str) -> dict[str, list[str]]:
    """Return the lines of the table that follows a heading in bold, by their first cell."""
    part = README[README.index(f"**{heading}") :]
    rows = re.search(r"(?:^\|.*\n)+", part, re.MULTILINE)
    assert rows is not None
    cells = [[cell.strip().replace("*", "") for cell in row.split("|")[1:-1]] for row in rows[0].splitlines()]
    return {first: rest for first, *rest in cells[2:]}


def line(heading: str, start: str) -> list[str]:
    (found,) = (rest for first, rest in lines_of(heading).items() if first.startswith(start))
    return found


@cache
def table_of(folder: str, spec: str, per_target: bool) -> Table:
    return spec_table(load_spec(spec), read_all([ROOT / "results" / folder]), per_target=per_target)


def cells(table: Table, row: str, group: str | None = None) -> dict[str, Cell]:
    (found,) = (line for line in table.rows if line.label == row)
    pairs = zip(table.columns, found.cells, strict=True)
    return {column.heading: cell for column, cell in pairs if group in (None, column.group)}


def shown(cell: Cell, spread: bool = False) -> str:
    return f"{cell.mean:.1f} ± {cell.std:.1f}" if spread else f"{cell.mean:.1f}"


@pytest.mark.parametrize("row", DIGITS)
def test_digits(row: str) -> None:
    method, statistics = DIGITS[row]
    filters = {"stream": ["online"], "algorithm": ["erm"], "method": [method], "statistics": [statistics]}
    records = where(read_all([ROOT / "results" / "digits"]), filters)
    by_metric = {
        metric: {row.label: row.cells[0] for row in results_table(records, metric=metric).rows}
        for metric in ("accuracy", "ece")
    }
    best = max(by_metric["accuracy"], key=lambda label: by_metric["accuracy"][label].mean or 0)
    told = [statistics, shown(by_metric["accuracy"][best], True), shown(by_metric["ece"][best])]
    assert line("Rotated digits", row) == told
    assert by_metric["accuracy"][best].count == 8


@pytest.mark.parametrize("row", PACS)
def test_pacs(row: str) -> None:
    table = table_of("pacs-resnet50_v1", str(ROOT / "benchmarks" / "pacs.toml"), True)
    accuracy = cells(table, PACS[row], "Batches of 20")
    ece = cells(table, PACS[row], "Batches of 20, ECE")["mean"]
    domains = [shown(accuracy[name]) for name in ("art_painting", "cartoon", "photo", "sketch")]
    assert line("PACS, ResNet-50", row) == [*domains, shown(accuracy["mean"], True), shown(ece)]
    assert accuracy["mean"].count == ece.count == 3


def test_the_best_others_on_pacs_are_the_best() -> None:
    table = table_of("pacs-resnet50_v1", str(ROOT / "benchmarks" / "pacs.toml"), True)
    means = {
        row.label: cells(table, row.label, "Batches of 20")["mean"].mean or 0
        for row in table.rows
        if row.label.endswith("meta-trained") and "as sure" not in row.label
    }
    published = {label: mean for label, mean in means.items() if "steps as ours" not in label}
    assert max(published, key=published.__getitem__) == PACS["best other on stream statistics"]
    elsewhere = ("tream statistics", "alanced statistics", "Out-of-fold", "No adaptation")
    of_batch = {label: mean for label, mean in published.items() if not any(w in label for w in elsewhere)}
    of_batch = {label: mean for label, mean in of_batch.items() if not label.startswith("vnl")}
    assert max(of_batch, key=of_batch.__getitem__) == PACS["best other on batch statistics"]
    assert max(means, key=means.__getitem__) == PACS["entropy minimisation on the schedule"]


@pytest.mark.parametrize("place", range(len(ROTATED)))
def test_rotated(place: int) -> None:
    folder = ROTATED[place]
    every = list(lines_of("Rotated MNIST and Fashion-MNIST").values())[place]
    table = table_of(folder, folder, folder == "shift_extent")
    erm, paper, ours = (list(cells(table, row).values()) for row in ("ERM baseline", PAPER, OURS))
    others = [
        list(cells(table, row.label).values())
        for row in table.rows
        if row.label.endswith("shortening steps, meta-trained")
    ]
    assert len(others) == 2
    wanted = [cell.heading for cell in table.columns if cell.target is not None or folder != "shift_extent"]
    kept = [index for index, column in enumerate(table.columns) if column.heading in wanted]
    kept = [place] if folder == "rotated" else kept
    best = max(others, key=lambda row: sum(row[index].mean or 0 for index in kept))
    told = [", ".join(shown(row[index]) for index in kept) for row in (erm, ours, best)]
    told.insert(1, ", ".join(f"{paper[index].paper:.1f}" for index in kept))
    assert every == told
    assert {ours[index].count for index in kept} == {5}
