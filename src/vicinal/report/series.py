"""The data of every figure, before anything is drawn: what a CSV beside a figure holds."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vicinal.evaluation.metrics import chance_ece
from vicinal.evaluation.record import Record
from vicinal.evaluation.statistics import Summary, deviation, per_seed, summary
from vicinal.report.board import Board, Cell, Column
from vicinal.report.plots import pooled_bins


@dataclass(frozen=True)
class Curve:
    """Accuracy so far, in percent, along the stream of one target: a point a batch."""

    row: str
    target: str
    images: list[int]
    mean: list[float]
    std: list[float] | None  # over seeds; None for one seed
    seeds: int


def curves_of(column: Column) -> list[Curve]:
    """Return the curve of every measured cell on every target."""
    return [
        curve
        for cell in column.measured.values()
        for target in column.targets
        if (curve := _curve(cell, target)) is not None
    ]


def _curve(cell: Cell, target: str) -> Curve | None:
    members = [record for record in cell.records if record.target == target and record.curve]
    if not members:
        return None
    # Under label shift the streams of two seeds differ in length; the mean needs all of them.
    length = min(len(record.curve) for record in members)
    by_seed: dict[int, list[Record]] = {}
    for record in members:
        by_seed.setdefault(record.model_seed, []).append(record)
    seeds = [
        [100 * statistics.fmean(record.curve[step] for record in runs) for step in range(length)]
        for runs in by_seed.values()
    ]
    points = list(zip(*seeds, strict=True))
    return Curve(
        cell.row,
        target,
        _images(members, length),
        [statistics.fmean(point) for point in points],
        [deviation(point) or 0.0 for point in points] if len(seeds) > 1 else None,
        len(seeds),
    )


def _images(records: Sequence[Record], length: int) -> list[int]:
    """Return how many images had come after each batch; the last batch may be short."""
    total = min(int(record.protocol.get("images", length * record.batch_size)) for record in records)
    size = records[0].batch_size
    return [min((step + 1) * size, max(total, step * size + 1)) for step in range(length)]


@dataclass(frozen=True)
class Reliability:
    """The confidence bins of a cell, pooled over targets and seeds; fractions."""

    row: str
    count: list[float]
    confidence: list[float]
    accuracy: list[float]
    ece: float  # the table's, a mean over runs, in percent


def reliabilities_of(column: Column) -> list[Reliability]:
    """Return the bins of every complete cell that has any."""
    found = []
    for row, cell in column.complete.items():
        members = [record for record in cell.records if sum(record.reliability.get("count", ())) > 0]
        if members:
            count, confidence, accuracy = (part.tolist() for part in pooled_bins(members))
            found.append(Reliability(row, count, confidence, accuracy, over_seeds(cell, ece).mean))
    return found


@dataclass(frozen=True)
class Point:
    """A cell as a point: a quantity across, another up over seeds, and the paper's figure if there is one."""

    row: str
    x: float
    y: Summary
    paper: float | None = None


def costs_of(column: Column) -> list[Point]:
    """Return seconds per image and accuracy in percent of every complete cell."""
    return [
        Point(row, over_seeds(cell, seconds_per_image).mean, over_seeds(cell, accuracy))
        for row, cell in column.complete.items()
    ]


@dataclass(frozen=True)
class Error:
    """The calibration error of a cell in percent, and what chance alone would make of it."""

    found: Summary
    by_chance: float


def errors_of(column: Column) -> dict[str, Error]:
    """Return the calibration error of every complete cell."""
    return {
        row: Error(over_seeds(cell, ece), over_seeds(cell, ece_by_chance).mean)
        for row, cell in column.complete.items()
    }


@dataclass(frozen=True)
class BatchSizes:
    """One metric over batch sizes, all else being equal: a line a row."""

    name: str
    metric: str
    lines: Mapping[str, list[Point]]


def batch_sizes_of(board: Board) -> list[BatchSizes]:
    """Return a family for each group of columns that differ in batch size alone, two sizes at least."""
    groups: dict[tuple[object, ...], list[Column]] = {}
    for column in board.columns:
        groups.setdefault(_but_batch_size(column), []).append(column)
    families = [_family(columns) for columns in groups.values() if len(columns) > 1]
    return [family for family in families if family.lines]


def _but_batch_size(column: Column) -> tuple[object, ...]:
    names = ("dataset", "backbone", "stream")
    parts = [tuple(sorted({getattr(record, name) for record in column.records})) for name in names]
    return (*parts, column.targets, column.metric)


def _family(columns: Sequence[Column]) -> BatchSizes:
    lines: dict[str, dict[float, Point]] = {}
    for column in columns:
        for row, cell in column.complete.items():
            sizes = {record.batch_size for record in cell.records}
            if cell.summary is not None and len(sizes) == 1:
                size, paper = sizes.pop(), cell.paper.value if cell.paper is not None else None
                lines.setdefault(row, {})[size] = Point(row, size, cell.summary, paper)
    record = columns[0].records[0]
    name = f"{record.dataset}, {record.backbone}, {record.stream} stream".replace("_", " ")
    several = {row: [points[x] for x in sorted(points)] for row, points in lines.items() if len(points) > 1}
    return BatchSizes(name, columns[0].metric, several)


def over_seeds(cell: Cell, value: Callable[[Record], float]) -> Summary:
    """Return the statistics of another quantity over the seeds that the cell's figure rests on."""
    runs = [(record.model_seed, record.target, value(record)) for record in cell.records]
    return summary(list(per_seed(run for run in runs if run[0] in cell.values).values()))


def accuracy(record: Record) -> float:
    """Return the accuracy in percent."""
    return 100 * record.accuracy


def ece(record: Record) -> float:
    """Return the expected calibration error in percent."""
    return 100 * record.ece


def ece_by_chance(record: Record) -> float:
    """Return the calibration error, in percent, to expect were confidence exactly the chance to be right."""
    return 100 * chance_ece(record.reliability)


def seconds_per_image(record: Record) -> float:
    """Return how long one image took, adaptation included."""
    return 1 / record.images_per_second if record.images_per_second > 0 else math.nan
