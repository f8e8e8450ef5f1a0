"""Records to rows, and rows to the table that follows a run; `export` has those of any records."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from vicinal.errors import DataError
from vicinal.evaluation.record import Record
from vicinal.evaluation.statistics import deviation, per_seed
from vicinal.report.printed import leaders, number, signed, told_apart

UNADAPTED = ("erm", "source", "none")
_CELL_HEADERS = ("Accuracy %", "vs ERM", "ECE", "NLL", "Brier", "Img/s", "Seeds")


class Setup(NamedTuple):
    """What is compared: a trained model and a way to run it on a stream."""

    algorithm: str
    method: str
    statistics: str
    predict: str


@dataclass(frozen=True)
class Row:
    """One line of a table: one setup on one kind of stream, over targets and seeds. Metrics are fractions."""

    algorithm: str
    method: str
    statistics: str
    predict: str
    stream: str
    seeds: int  # source models; several streams drawn for one are averaged
    complete: bool  # whether every seed was measured on every target of the row
    accuracy_mean: float
    accuracy_std: float
    ece_mean: float
    ece_std: float
    nll_mean: float
    brier_mean: float
    per_target: dict[str, float]
    images_per_second: float

    @property
    def setup(self) -> Setup:
        """Return the row's setup, the same on every kind of stream."""
        return Setup(self.algorithm, self.method, self.statistics, self.predict)


def setup_of(record: Record) -> Setup:
    """Return the setup a record measures."""
    return Setup(record.algorithm, record.method, record.statistics, record.predict)


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the records without repeats: of runs that share setup, stream, target and seeds the last counts.

    Records that no table should average over (datasets, backbones, batch sizes of one setup) raise.
    """
    kept: dict[tuple[Setup, str, str, int, int], Record] = {}
    mixed: dict[str, set[str]] = {}
    for record in records:
        setup = setup_of(record)
        kept[setup, record.stream, record.target, record.model_seed, record.seed] = record
        mixed.setdefault("datasets", set()).add(record.dataset)
        mixed.setdefault("backbones", set()).add(record.backbone)
        where = f"batch sizes for {'/'.join(setup)} on the {record.stream} stream"
        mixed.setdefault(where, set()).add(str(record.batch_size))
    for kind, values in mixed.items():
        if len(values) > 1:
            raise DataError(f"these records mix {kind} ({', '.join(sorted(values))}): report each by itself")
    return unite_choices(list(kept.values()))


def unite_choices(records: list[Record]) -> list[Record]:
    """Return the records with one setup for a method that chose, model by model, who predicts.

    Own output on some seeds and labels on others, never both on one, is one method that chose; apart, its
    rows would show subsets of the seeds.
    """
    runs: dict[tuple[str, ...], dict[str, set[tuple[int, int, str]]]] = {}
    for record in records:
        key = (record.algorithm, record.method, record.statistics)
        run = record.model_seed, record.seed, record.stream
        runs.setdefault(key, {}).setdefault(record.predict, set()).add(run)
    chose = {key for key, by in runs.items() if len(by) > 1 and not set.intersection(*by.values())}
    return [
        replace(record, predict="chosen")
        if (record.algorithm, record.method, record.statistics) in chose
        else record
        for record in records
    ]


def summarise(records: Iterable[Record]) -> list[Row]:
    """Return one row per setup and stream: targets averaged within a seed, then mean and std over seeds.

    The std is the sample's (ddof=1), 0 for one seed. Rows of one stream stand together, its ERM row first,
    the others in order of first appearance.
    """
    groups: dict[str, dict[Setup, list[Record]]] = {}
    for record in latest(records):
        groups.setdefault(record.stream, {}).setdefault(setup_of(record), []).append(record)
    rows: list[Row] = []
    for stream, setups in groups.items():
        of_stream = [_row(setup, stream, members) for setup, members in setups.items()]
        first = reference(of_stream, stream)
        rows += sorted(of_stream, key=lambda row: row is not first)
    return rows


def _row(setup: Setup, stream: str, records: Sequence[Record]) -> Row:
    def seeds(value: Callable[[Record], float]) -> list[float]:
        return list(
            per_seed((record.model_seed, record.target, value(record)) for record in records).values()
        )

    accuracies, eces = seeds(lambda r: r.accuracy), seeds(lambda r: r.ece)
    by_target: dict[str, list[float]] = {}
    for record in records:
        by_target.setdefault(record.target, []).append(record.accuracy)
    return Row(
        *setup,
        stream=stream,
        seeds=len(accuracies),
        complete=len({(r.model_seed, r.target) for r in records}) == len(accuracies) * len(by_target),
        accuracy_mean=statistics.fmean(accuracies),
        accuracy_std=deviation(accuracies) or 0.0,
        ece_mean=statistics.fmean(eces),
        ece_std=deviation(eces) or 0.0,
        nll_mean=statistics.fmean(seeds(lambda r: r.nll)),
        brier_mean=statistics.fmean(seeds(lambda r: r.brier)),
        per_target={target: statistics.fmean(values) for target, values in by_target.items()},
        images_per_second=statistics.fmean(r.images_per_second for r in records),
    )


def reference(rows: Sequence[Row], stream: str) -> Row | None:
    """Return the ERM row of a stream: trained by ERM, not adapted, on source statistics; None without one."""
    for row in rows:
        if row.stream == stream and is_erm(row.setup) and row.statistics == "source" and row.predict == "own":
            return row
    return None


def is_erm(setup: Setup) -> bool:
    """Return whether the setup is an ERM model that is not adapted."""
    return setup.algorithm == "erm" and setup.method in UNADAPTED


def difference(row: Row, erm: Row | None) -> float:
    """Return how far the row's mean accuracy lies above ERM's; NaN where the two are not comparable.

    They are when both were measured on the same targets with every seed.
    """
    if erm is None or not (row.complete and erm.complete) or row.per_target.keys() != erm.per_target.keys():
        return math.nan
    return row.accuracy_mean - erm.accuracy_mean


def best(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that share the highest accuracy of their stream, as printed.

    Only rows measured on every target of the stream compete: the mean over the easy ones proves nothing. A
    row alone on its stream is not a winner.
    """
    winners: list[Row] = []
    for stream in dict.fromkeys(row.stream for row in rows):
        of_stream = [row for row in rows if row.stream == stream]
        targets = {target for row in of_stream for target in row.per_target}
        fair = [row for row in of_stream if row.complete and row.per_target.keys() == targets]
        ranks = leaders([100 * row.accuracy_mean for row in fair], decimals=1, higher_is_better=True)
        winners += [row for row, rank in zip(fair, ranks, strict=True) if rank == 0]
    return winners


def labels(setups: Iterable[Setup]) -> dict[Setup, str]:
    """Return a short name for each setup: its method, and in brackets only what tells namesakes apart."""
    setups = list(dict.fromkeys(setups))
    return dict(zip(setups, told_apart([base_name(setup) for setup in setups], setups), strict=True))


def base_name(setup: Setup) -> str:
    """Return the setup's method, or how its model was trained where nothing adapts it."""
    if is_erm(setup):
        return "ERM"
    return f"{setup.algorithm}, not adapted" if setup.method in UNADAPTED else setup.method


def percent(fraction: float) -> str:
    """Return a fraction in percent with one decimal."""
    return number(100 * fraction, 1)


def decimal(value: float) -> str:
    """Return a number with three decimals."""
    return number(value, 3)


def points(fraction: float) -> str:
    """Return a difference of fractions in percent points with its sign; empty for NaN."""
    return signed(100 * fraction, 1) if math.isfinite(fraction) else ""


def spread(mean: float, std: float, seeds: int) -> str:
    """Return 'mean ± std' in percent; the mean alone for one seed, whose spread is unknown."""
    return percent(mean) if seeds < 2 else f"{percent(mean)} ± {percent(std)}"


def cells(row: Row, erm: Row | None) -> list[str]:
    """Return the printed numbers of a row, in the order of the columns that follow its names."""
    return [
        spread(row.accuracy_mean, row.accuracy_std, row.seeds) + ("" if row.complete else " *"),
        "" if row is erm else points(difference(row, erm)),
        spread(row.ece_mean, row.ece_std, row.seeds),
        decimal(row.nll_mean),
        decimal(row.brier_mean),
        f"{row.images_per_second:,.0f}",
        str(row.seeds),
    ]


def rich_table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table for the terminal, the best accuracy of each stream in bold."""
    incomplete = not all(row.complete for row in rows)
    table = Table(
        box=SIMPLE_HEAD, caption="* not every seed was measured on every target" if incomplete else None
    )
    table.add_column("Method")
    for header in _CELL_HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    winners, names = best(rows), labels(row.setup for row in rows)
    stream = None
    for row in rows:
        numbers = cells(row, reference(rows, row.stream))
        if row in winners:
            numbers[0] = f"[bold]{numbers[0]}[/bold]"
        if row.stream != stream:
            table.add_section()
            table.add_row(f"[dim]{escape(row.stream)} stream[/dim]")
            stream = row.stream
        table.add_row(escape(names[row.setup]), *numbers)
    return table
