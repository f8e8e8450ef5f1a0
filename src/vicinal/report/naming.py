"""Which row and column of a page a record belongs to: by its benchmark, or by what tells it from others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vicinal.benchmarks.spec import Spec
from vicinal.benchmarks.store import benchmark_of, in_cell
from vicinal.errors import DataError
from vicinal.evaluation.record import Record
from vicinal.report.content import as_text, flat
from vicinal.report.tables import Setup, labels, setup_of, unite_choices

# What tells columns apart, and how each reads in a heading.
_COLUMN_PARTS: Mapping[str, str] = {
    "dataset": "{}",
    "backbone": "{}",
    "stream": "{} stream",
    "batch_size": "batch size {}",
}


@dataclass(frozen=True)
class Named:
    """A record with its place on the page."""

    row: str
    column: str
    record: Record


def by_label(spec: Spec, records: Sequence[Record]) -> list[Named]:
    """Return the places of records in a benchmark's table; those of other benchmarks are left out.

    A run is on record once: it stands in every column that differs from its own in the metric alone.
    """
    rows = {row.label: {s.name for s in spec.settings if row in spec.rows_of(s)} for row in spec.rows}
    columns = _columns_of_runs(spec)
    own: dict[tuple[str, str, int, str], Named] = {}
    shared: dict[tuple[str, str, int, str], Named] = {}
    for record in records:
        place = benchmark_of(record)
        row, column = str(place.get("row")), str(place.get("setting"))
        if place.get("spec") != spec.name:
            continue
        if row not in rows or column not in columns:
            raise DataError(
                f"a record was measured for '{row}' in '{column}', which benchmark '{spec.name}' "
                "does not have: run it again"
            )
        own[row, column, record.seed, record.target] = Named(row, column, record)
        for name in rows[row].intersection(columns[column]):
            moved = in_cell(record, spec.name, row, name)
            shared[row, name, record.seed, record.target] = Named(row, name, moved)
    if not own:
        raise DataError(f"no record of benchmark '{spec.name}': run `vicinal reproduce {spec.name}` first")
    return list({**shared, **own}.values())


def _columns_of_runs(spec: Spec) -> dict[str, list[str]]:
    """Return, for every column, those that show the same runs: they differ from it in their metric alone."""
    asked = {one.name: replace(one, name="", metric=None) for one in spec.settings}
    return {name: [other for other in asked if asked[other] == what] for name, what in asked.items()}


def by_looks(records: Sequence[Record]) -> list[Named]:
    """Return places for records of no benchmark: a column a data set, backbone, stream and batch size.

    A row is a model and a method. Runs that differ in nothing are repeats, of which the last counts; where
    one seed ran a method with several options on one stream, each value of these has a row of its own.
    """
    varying = [name for name in _COLUMN_PARTS if len({getattr(r, name) for r in records}) > 1] or ["dataset"]
    records = unite_choices(list(records))
    names, options = labels(setup_of(record) for record in records), telling_options(records)
    found: dict[tuple[object, ...], Named] = {}
    for record in records:
        setup, given = setup_of(record), _options(record)
        row = ", ".join([names[setup], *(f"{name} {given.get(name, '-')}" for name in options[setup])])
        parts = (_COLUMN_PARTS[name].format(getattr(record, name)) for name in varying)
        column = ", ".join(part.replace("_", " ") for part in parts)
        found[row, column, record.model_seed, record.seed, record.target] = Named(row, column, record)
    return list(found.values())


def telling_options(records: Sequence[Record]) -> dict[Setup, list[str]]:
    """Return, for each setup, the options that differ between its runs of one seed on one stream.

    An option that differs between seeds alone was chosen model by model and tells nothing apart.
    """
    runs: dict[Setup, dict[tuple[object, ...], list[Mapping[str, str]]]] = {}
    for record in records:
        where = (record.dataset, record.backbone, record.stream, record.batch_size, record.target)
        run = (*where, record.model_seed, record.seed)
        runs.setdefault(setup_of(record), {}).setdefault(run, []).append(_options(record))
    return {setup: sorted(_differing(of_setup.values())) for setup, of_setup in runs.items()}


def _differing(groups: Iterable[Sequence[Mapping[str, str]]]) -> set[str]:
    found: set[str] = set()
    for group in groups:
        for name in {name for options in group for name in options}:
            if len({options.get(name) for options in group}) > 1:
                found.add(name)
    return found


def _options(record: Record) -> dict[str, str]:
    """Return the options of method and training as texts, by their dotted names."""
    adapter, training = record.protocol.get("adapter"), record.protocol.get("training")
    given = {**_table(adapter), "training": _table(training).get("train")}
    return {name: as_text(value) for name, value in flat(given) if name not in ("seed", "training.seed")}


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
