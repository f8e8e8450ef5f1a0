"""Records to the cells of a page: who was measured where, over which seeds, beside what the paper prints."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vicinal.benchmarks.metric import METRICS, Metric
from vicinal.benchmarks.peers import COMPARE
from vicinal.benchmarks.plan import groups_of
from vicinal.benchmarks.spec import SUFFIX, Figure, Spec, load_spec, spec_names
from vicinal.benchmarks.store import benchmark_of
from vicinal.data.streams import StreamSpec
from vicinal.errors import DataError
from vicinal.evaluation.record import Record
from vicinal.evaluation.statistics import Paired, Summary, paired, per_seed, summary
from vicinal.report.naming import Named, by_label, by_looks


@dataclass(frozen=True)
class Cell:
    """One row in one column: its runs, a value per seed, and the paper's figures for it."""

    row: str
    column: str
    records: tuple[Record, ...] = ()
    values: Mapping[int, float] = field(default_factory=dict)  # of seeds measured on every target
    unfinished: int = 0  # seeds that lack a target
    values_by_target: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    paper: Figure | None = None
    paper_by_target: Mapping[str, Figure] = field(default_factory=dict)
    against: Paired | None = None  # the column's reference, over the seeds that both have

    @property
    def summary(self) -> Summary | None:
        """Return the statistics over seeds; None where no seed was measured on every target."""
        return summary(list(self.values.values())) if self.values else None

    def of(self, target: str | None) -> Mapping[int, float]:
        """Return the value of each seed on a target; without one the mean over all."""
        return self.values if target is None else self.values_by_target.get(target, {})

    @property
    def seeds(self) -> int:
        """Return on how many seeds the cell's figure rests."""
        return len(self.values)


@dataclass(frozen=True)
class Column:
    """One setting: its cells by row, those of the paper alone included."""

    name: str
    metric: str
    targets: tuple[str, ...]
    cells: Mapping[str, Cell]
    reference: str | None = None  # the row the others are compared with

    @property
    def measured(self) -> dict[str, Cell]:
        """Return the cells with runs."""
        return {row: cell for row, cell in self.cells.items() if cell.records}

    @property
    def complete(self) -> dict[str, Cell]:
        """Return the cells with a seed that was measured on every target."""
        return {row: cell for row, cell in self.cells.items() if cell.values}

    @property
    def parts(self) -> tuple[str, ...]:
        """Return what the mean is taken apart into: its targets, or the domains of their joint stream."""
        measured = dict.fromkeys(name for cell in self.cells.values() for name in cell.values_by_target)
        domains = tuple(name for name in measured if name not in self.targets)
        return domains if domains and len(self.targets) == 1 else self.targets

    @property
    def records(self) -> list[Record]:
        """Return the runs of all cells."""
        return [record for cell in self.cells.values() for record in cell.records]

    @property
    def reading(self) -> Metric:
        """Return how the column reads a record."""
        return METRICS[self.metric]


@dataclass(frozen=True)
class Board:
    """All of a page's columns, and its rows in their order."""

    columns: tuple[Column, ...]
    rows: tuple[str, ...]
    ours: frozenset[str] = frozenset()  # rows of the paper's own method
    quick: bool = False  # the runs only show that it runs
    laid_out: bool = False  # by a spec, which orders the rows

    def cell(self, row: str, column: str) -> Cell | None:
        """Return a cell by its names; None where the table has none."""
        return next((c.cells.get(row) for c in self.columns if c.name == column), None)

    @property
    def records(self) -> list[Record]:
        """Return the runs behind the page."""
        return [record for column in self.columns for record in column.records]


def make_board(spec: Spec | None, records: Sequence[Record]) -> Board:
    """Return the cells of a spec, or without one those that the records themselves suggest."""
    records, quick = _in_earnest(records)
    if not records:
        raise DataError("no records to report: run an evaluation first")
    named = by_looks(records) if spec is None else by_label(spec, records)
    columns = [_column(spec, name, named) for name in dict.fromkeys(one.column for one in named)]
    if spec is not None:
        order = [setting.name for setting in spec.settings]
        columns.sort(key=lambda column: order.index(column.name))
    rows = dict.fromkeys(row for column in columns for row in column.cells)
    if spec is not None:
        rows = dict.fromkeys(row.label for row in spec.rows if row.label in rows)
    ours = frozenset(row.label for row in spec.rows if row.ours) if spec is not None else frozenset()
    return Board(tuple(columns), tuple(rows), ours, quick, laid_out=spec is not None)


def _in_earnest(records: Sequence[Record]) -> tuple[list[Record], bool]:
    """Return the records without those of quick runs, unless there are no others, and whether they are."""
    full = [record for record in records if not benchmark_of(record).get("quick")]
    return (full, False) if full else (list(records), bool(records))


def spec_of(records: Iterable[Record]) -> Spec | None:
    """Return the benchmark that records name; None where they name none."""
    named = {str(benchmark_of(record).get("spec", COMPARE)) for record in records} - {COMPARE}
    names = sorted(named)
    if len(names) > 1:
        raise DataError(f"these records are of several benchmarks ({', '.join(names)}): choose with --spec")
    if names and names[0] not in spec_names():
        raise DataError(f"these records are of benchmark '{names[0]}': give its file, --spec FILE{SUFFIX}")
    return load_spec(names[0]) if names else None


def _column(spec: Spec | None, name: str, named: Sequence[Named]) -> Column:
    rows: dict[str, list[Record]] = {}
    for one in named:
        if one.column == name:
            rows.setdefault(one.row, []).append(one.record)
    metric = "accuracy" if spec is None else spec.metric_of(name)
    measured = [record for members in rows.values() for record in members]
    targets = tuple(dict.fromkeys([*_planned(spec, name, measured), *(r.target for r in measured)]))
    reference = _reference(rows) if spec is None else _spec_reference(spec, rows)
    figures = [] if spec is None else [figure for figure in spec.figures if figure.setting == name]
    labels = rows if spec is None else [row.label for row in spec.rows]
    cells: dict[str, Cell] = {}
    for row in labels:
        of_row = [figure for figure in figures if figure.row == row]
        if row in rows or of_row:
            cells[row] = _cell(row, name, METRICS[metric], rows.get(row, ()), targets, of_row)
    return Column(name, metric, targets, _compared(cells, reference), reference)


def _planned(spec: Spec | None, name: str, records: Sequence[Record]) -> list[str]:
    """Return the targets that a column's mean needs; a quick run may have others than its spec."""
    if spec is None or any(benchmark_of(record).get("quick") for record in records):
        return []
    groups = groups_of(spec.setting(name))
    if StreamSpec(spec.setting(name).stream).joint:
        return ["+".join(group) for group in groups]
    return [target for group in groups for target in group]


def _cell(
    row: str,
    column: str,
    metric: Metric,
    records: Sequence[Record],
    targets: Sequence[str],
    figures: Sequence[Figure],
) -> Cell:
    runs = [(record.model_seed, record.target, metric.value(record)) for record in records]
    whole = {seed for seed, *_ in runs if {t for s, t, _ in runs if s == seed} == set(targets)}
    parts = [*runs, *_domain_runs(records, metric)]
    of_target = {t: [run for run in parts if run[1] == t] for t in dict.fromkeys(run[1] for run in parts)}
    return Cell(
        row,
        column,
        tuple(records),
        per_seed(run for run in runs if run[0] in whole),
        len({seed for seed, *_ in runs} - whole),
        {t: per_seed(members) for t, members in of_target.items()},
        next((figure for figure in figures if figure.target is None), None),
        {figure.target: figure for figure in figures if figure.target is not None},
    )


def _domain_runs(records: Sequence[Record], metric: Metric) -> list[tuple[int, str, float]]:
    """Return the runs of joint streams domain by domain, for metrics that are of accuracy alone."""
    if metric not in (METRICS["accuracy"], METRICS["error"]):
        return []
    return [
        (record.model_seed, domain, metric.value(replace(record, accuracy=share)))
        for record in records
        for domain, share in record.protocol.get("accuracy_by_domain", {}).items()
    ]


def _compared(cells: Mapping[str, Cell], reference: str | None) -> dict[str, Cell]:
    """Return the cells, each with its paired difference to the reference."""
    base = cells[reference].values if reference is not None else {}
    made = {}
    for row, cell in cells.items():
        both = bool(base.keys() & cell.values.keys()) and row != reference
        made[row] = Cell(**{**vars(cell), "against": paired(cell.values, base) if both else None})
    return made


def _reference(rows: Mapping[str, Iterable[Record]]) -> str | None:
    """Return the row of the ERM model that nothing adapts; None without one."""
    for row, records in rows.items():
        if all((r.algorithm, r.method, r.statistics, r.predict) == _ERM for r in records):
            return row
    return None


_ERM = ("erm", "erm", "source", "own")


def _spec_reference(spec: Spec, rows: Mapping[str, Iterable[Record]]) -> str | None:
    """Return the ERM row of a spec; in a table without one its first row that is not the paper's method."""
    measured = [row for row in spec.rows if row.label in rows]
    plain = [row for row in measured if row.method == "erm"]
    others = [row for row in measured if not row.ours]
    first = [*plain, *others][:1]
    return first[0].label if first else None
