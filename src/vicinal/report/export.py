"""Records to a table of cells that know their numbers; `formats` prints it.

Everything is in the unit of the column's metric (`vicinal.benchmarks.metric`): percent, seconds, millions.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vicinal.benchmarks.metric import METRICS, Metric
from vicinal.benchmarks.spec import Figure, Spec
from vicinal.errors import DataError, UnknownNameError
from vicinal.evaluation.record import Record
from vicinal.evaluation.statistics import Paired, Summary, paired, per_seed, summary
from vicinal.report import board, grouping
from vicinal.report.grouping import Run
from vicinal.report.printed import leaders, told_apart
from vicinal.report.select import check_names

QUICK = "measured with --quick: it shows that everything runs, not how well"


@dataclass(frozen=True)
class Cell:
    """What was measured (None: nothing), what the paper prints, and how it compares with the baseline."""

    measured: Summary | None = None
    paper: float | None = None
    paper_std: float | None = None
    versus: Paired | None = None
    unfinished: int = 0  # seeds that lack a target of the column and do not count
    complete: bool = True  # False: all seeds lack a target; the mean is over what there is
    rank: int | None = None  # 0: best of its column as printed, 1: runner-up

    @property
    def mean(self) -> float | None:
        """Return the mean over seeds."""
        return self.measured.mean if self.measured else None

    @property
    def std(self) -> float | None:
        """Return the standard deviation over seeds; None for one."""
        return self.measured.std if self.measured else None

    @property
    def count(self) -> int:
        """Return how many seeds were measured."""
        return self.measured.count if self.measured else 0

    @property
    def difference(self) -> float | None:
        """Return the mean difference to the baseline over shared seeds; None where there is none."""
        return self.versus.difference if self.versus else None

    @property
    def p(self) -> float | None:
        """Return the p of that difference; None below five shared seeds."""
        return self.versus.p if self.versus else None


@dataclass(frozen=True)
class Column:
    """One column: a metric on one target, or without a target its mean over the targets."""

    heading: str
    metric: str = "accuracy"
    target: str | None = None
    group: str = ""  # heading over several columns

    @property
    def measure(self) -> Metric:
        """Return how the column reads a record."""
        return METRICS[self.metric]


@dataclass(frozen=True)
class Row:
    """One line: a label of its own, the names it stands under, a cell for each column."""

    label: str
    names: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Columns and rows of cells; `headings` stand over the rows' names."""

    title: str
    headings: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    baseline: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Line:
    """A row before its statistics: the runs and the paper's figures of each column."""

    label: str
    names: tuple[str, ...]
    runs: Mapping[Column, list[Run]]
    figures: Mapping[Column, Figure | None] = field(default_factory=dict)


def results_table(
    records: Sequence[Record],
    *,
    by: Sequence[str] = (),
    metric: str = "accuracy",
    per_target: bool = False,
    baseline: str | None = None,
) -> Table:
    """Return any records as a table: a row for each combination of `by`, a column for each condition.

    Without `by` rows are as fine as they need to be so that none averages over unlike runs, best first; with
    it they are ordered by its values, and a row that would average over unlike runs is an error. Conditions
    are data set, backbone, kind of stream and batch size, as far as they differ.
    """
    if metric not in METRICS:
        raise UnknownNameError("metric", metric, METRICS)
    check_names(by, records)
    runs = [Run(record) for record in records]
    names = tuple(by) or grouping.default_by(runs)
    groups = grouping.checked_groups(runs, names)
    columns = _columns(runs, names, metric, per_target)
    keys = sorted(groups, key=lambda key: [grouping.order(value) for value in key])
    labels = told_apart([str(key[0]) for key in keys], [tuple(map(str, key[1:])) for key in keys])
    lines = []
    for key, label in zip(keys, labels, strict=True):
        of_place: dict[tuple[Any, ...], list[Run]] = {}
        for run in groups[key]:
            of_place.setdefault(grouping.place_of(run, names), []).append(run)
        found = {column: of_place.get(place, []) for column, place in columns.items()}
        lines.append(_Line(label, tuple(_shown(value) for value in key), found))
    title = ": ".join(filter(None, (heading(metric), grouping.said(grouping.shared_facts(runs, names)))))
    table = _filled(title, names, list(columns), lines, baseline)
    return table if by else _best_first(table)


def _columns(
    runs: Sequence[Run], by: Sequence[str], metric: str, per_target: bool
) -> dict[Column, tuple[Any, ...]]:
    """Return every column with the place its runs fall in."""
    columns: dict[Column, tuple[Any, ...]] = {}
    for place, said in grouping.places(runs, by).items():
        targets = [run.record.target for run in runs if grouping.place_of(run, by) == place]
        for column in _of_place(said or heading(metric), metric, targets if per_target else ()):
            columns[column] = place
    return columns


def _of_place(name: str, metric: str, targets: Iterable[str]) -> list[Column]:
    """Return a column for each target and one for their mean; without targets that one alone."""
    targets = sorted(set(targets), key=grouping.order)
    if not targets:
        return [Column(name, metric)]
    return [*(Column(target, metric, target, name) for target in targets), Column("mean", metric, None, name)]


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def spec_table(
    spec: Spec, records: Sequence[Record], *, per_target: bool = False, baseline: str | None = None
) -> Table:
    """Return a benchmark's table: its rows and columns, what the paper prints beside what was measured."""
    found = board.make_board(spec, records)
    columns: dict[Column, board.Column] = {}
    for place in found.columns:
        printed = [target for cell in place.cells.values() for target in cell.paper_by_target]
        targets = (*place.targets, *printed) if per_target else ()
        columns |= dict.fromkeys(_of_place(place.name, place.metric, targets), place)
    lines = []
    for row in found.rows:
        cells = {column: place.cells[row] for column, place in columns.items() if row in place.cells}
        runs = {column: _alike(cell) for column, cell in cells.items()}
        figures = {column: _figure(cell, column.target) for column, cell in cells.items()}
        lines.append(_Line(row, (row,), runs, figures))
    notes = (QUICK,) if found.quick else ()
    return _filled(spec.title, ("method",), list(columns), lines, baseline, notes)


def _alike(cell: board.Cell) -> list[Run]:
    """Return a cell's runs; the command line can put another backbone in a setting's place for some seeds."""
    runs = [Run(record) for record in cell.records]
    found = grouping.unlike(runs) or grouping.clash({(): runs}, ())
    if found is not None:
        name, values = found
        differing = f"{name} ({', '.join(map(str, values))})"
        raise DataError(f"'{cell.row}' in '{cell.column}' has runs that differ in {differing}: choose one")
    return runs


def _figure(cell: board.Cell, target: str | None) -> Figure | None:
    return cell.paper if target is None else cell.paper_by_target.get(target)


def heading(metric: str) -> str:
    """Return a metric's name and unit as printed."""
    name = {"ece": "ECE", "nll": "NLL", "brier": "Brier score"}.get(metric, metric.replace("_", " "))
    unit = METRICS[metric].unit
    return f"{name}, {unit}" if unit else name


def _filled(
    title: str,
    headings: Sequence[str],
    columns: Sequence[Column],
    lines: Sequence[_Line],
    baseline: str | None,
    notes: tuple[str, ...] = (),
) -> Table:
    """Return the table with all statistics, column by column."""
    if baseline is not None and baseline not in [line.label for line in lines]:
        raise UnknownNameError("baseline", baseline, [line.label for line in lines])
    filled = [_filled_column(column, lines, baseline) for column in columns]
    rows = [
        Row(line.label, line.names, tuple(cells[index] for cells in filled))
        for index, line in enumerate(lines)
    ]
    return Table(title, tuple(headings), tuple(columns), tuple(rows), baseline, notes)


def _filled_column(column: Column, lines: Sequence[_Line], baseline: str | None) -> list[Cell]:
    """Return a column's cells, in the order of the lines."""
    runs = [
        [run for run in line.runs.get(column, ()) if column.target in (None, run.record.target)]
        for line in lines
    ]
    targets = {run.record.target for members in runs for run in members}
    whole = [_whole_seeds(column, members, targets) for members in runs]
    against = {line.label: values for line, values in zip(lines, whole, strict=True)}.get(baseline or "")
    cells = []
    for line, members, values in zip(lines, runs, whole, strict=True):
        every = per_seed(_measured(column, members))
        counted = list((values or every).values())
        versus = None if not against or not values or line.label == baseline else paired(values, against)
        figure = line.figures.get(column)
        cells.append(
            Cell(
                summary(counted) if counted else None,
                figure.value if figure else None,
                figure.std if figure else None,
                versus if versus and versus.count else None,
                unfinished=len(every) - len(values),
                complete=bool(values) or not every,
            )
        )
    return _ranked(cells, column.measure)


def _measured(column: Column, runs: Iterable[Run]) -> list[tuple[int, str, float]]:
    try:
        return [(run.seed, run.record.target, column.measure.value(run.record)) for run in runs]
    except KeyError as error:
        raise DataError(
            f"these records do not say their {column.metric} (no {error} in the protocol)"
        ) from None


def _whole_seeds(column: Column, runs: Sequence[Run], targets: set[str]) -> dict[int, float]:
    """Return the values of the seeds that were measured on every target: means over some would mislead."""
    found: dict[int, set[str]] = {}
    for run in runs:
        found.setdefault(run.seed, set()).add(run.record.target)
    return per_seed(_measured(column, [run for run in runs if found[run.seed] == targets]))


def _ranked(cells: Sequence[Cell], metric: Metric) -> list[Cell]:
    fair = [cell.mean if cell.complete and cell.mean is not None else math.nan for cell in cells]
    ranks = leaders(fair, metric.decimals, metric.higher_is_better)
    return [replace(cell, rank=rank) for cell, rank in zip(cells, ranks, strict=True)]


def _best_first(table: Table) -> Table:
    """Return the table with its rows by their mean in the first condition; those without one last."""
    index = next(i for i, column in enumerate(table.columns) if column.target is None)
    sign = -1 if table.columns[index].measure.higher_is_better else 1

    def key(row: Row) -> float:
        mean = row.cells[index].mean
        return sign * mean if mean is not None and math.isfinite(mean) else math.inf

    return replace(table, rows=tuple(sorted(table.rows, key=key)))
