"""Streams one by one: a row a draw, a column a method."""

from collections.abc import Sequence

from rich.table import Table

from vicinal.evaluation.record import Record
from vicinal.report.tables import labels, latest, percent, setup_of


def draws_table(records: Sequence[Record], title: str) -> Table:
    """Return the accuracy of every method on every single stream, in percent."""
    records = latest(records)
    names = labels(setup_of(record) for record in records)
    cells = {(*_stream(record), names[setup_of(record)]): record.accuracy for record in records}
    table = Table(title=title, title_justify="left")
    for column in ("draw", "target", *dict.fromkeys(names.values())):
        table.add_column(column, justify="right")
    for stream in sorted({_stream(record) for record in records}):
        values = [cells.get((*stream, name), float("nan")) for name in dict.fromkeys(names.values())]
        _, seed, target = stream
        table.add_row(str(seed), target, *(percent(value) for value in values))
    return table


def _stream(record: Record) -> tuple[int, int, str]:
    """Return what tells a stream from the others: its model, its draw, its target."""
    return record.model_seed, record.seed, record.target
