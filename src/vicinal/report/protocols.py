"""How each cell of a page came about: what its column shares, what is its own, and its value run by run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vicinal.evaluation.record import Record
from vicinal.evaluation.statistics import per_seed
from vicinal.report import content
from vicinal.report.board import Board, Cell, Column
from vicinal.report.printed import number
from vicinal.report.views import anchor, heading


@dataclass(frozen=True)
class CellProtocol:
    """How one cell came about: what it does not share with its column, and its value run by run."""

    anchor: str
    row: str
    settings: list[tuple[str, str]]
    runs: list[list[str]]  # a line a seed: the seed, a value per target, their mean


@dataclass(frozen=True)
class ColumnProtocol:
    """What all cells of a column share, and each cell's own."""

    name: str
    metric: str
    targets: list[str]
    shared: list[tuple[str, str]]
    cells: list[CellProtocol]


def protocol_of(column: Column, board: Board) -> ColumnProtocol:
    """Return the protocol of every cell of a column."""
    everything = {
        row: dict(content.shared(_facts(r) for r in c.records)) for row, c in column.measured.items()
    }
    common = _common(list(everything.values()))
    cells = [
        CellProtocol(
            anchor(board, column, row),
            row,
            [pair for pair in facts.items() if pair not in common.items()],
            _runs(column.cells[row], column),
        )
        for row, facts in everything.items()
    ]
    return ColumnProtocol(
        column.name, heading(column.metric), list(column.targets), list(common.items()), cells
    )


def _facts(record: Record) -> Mapping[str, object]:
    names = ("dataset", "backbone", "algorithm", "method", "statistics", "predict", "stream", "batch_size")
    # Of "prediction" records once said the same of every method; `predict` has what is so.
    said = ("benchmark", "prediction")
    protocol = {name: value for name, value in record.protocol.items() if name not in said}
    benchmark = record.protocol.get("benchmark") or {}
    keys = {name: benchmark[name] for name in ("key", "model", "quick") if name in benchmark}
    return {**{name: getattr(record, name) for name in names}, **protocol, **keys}


def _common(everything: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first = everything[0] if len(everything) > 1 else {}
    return {
        name: text for name, text in first.items() if all(facts.get(name) == text for facts in everything)
    }


def _runs(cell: Cell, column: Column) -> list[list[str]]:
    """Return the measured values, a line a seed; several streams of one model are averaged."""
    lines = []
    for seed in sorted({record.model_seed for record in cell.records}):
        runs = [(seed, r.target, column.reading.value(r)) for r in cell.records if r.model_seed == seed]
        parts: list[Mapping[int, float]] = [
            per_seed(run for run in runs if run[1] == target) for target in column.targets
        ]
        # With one target the mean over targets would only repeat it.
        parts += [cell.values] if len(column.targets) > 1 else []
        lines.append([str(seed), *(_run(part.get(seed), column) for part in parts)])
    return lines


def _run(value: float | None, column: Column) -> str:
    return "" if value is None else number(value, column.reading.decimals + 1)
