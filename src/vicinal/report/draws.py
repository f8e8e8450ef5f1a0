"""Streams one by one: a row a draw, a column a method."""

from collections.abc import Sequence

from rich.table import Table

from vicinal.evaluation.record import Record
from vicinal.report.tables import labels, latest, percent, setup_of


def draws_table(records: Sequence[Record], title: str) -> Table:
    """Return the accuracy of every method on every single stream, in percent."""
    records = latest(records)
    names = labels(setup_of(record) for record in records)
    cells = {(record.seed, record.target, names[setup_of(record)]): record.accuracy for record in records}
    table = Table(title=title, title_justify="left")
    for column in ("draw", "target", *dict.fromkeys(names.values())):
        table.add_column(column, justify="right")
    for seed, target in sorted({(record.seed, record.target) for record in records}):
        values = [cells.get((seed, target, name), float("nan")) for name in dict.fromkeys(names.values())]
        table.add_row(str(seed), target, *(percent(value) for value in values))
    return table
