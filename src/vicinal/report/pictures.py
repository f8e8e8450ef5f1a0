"""The figures of a page: panels to stand in it, a PNG and a CSV to lie beside it."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from vicinal.benchmarks.store import benchmark_of
from vicinal.evaluation.record import Record
from vicinal.report import figures, series
from vicinal.report.board import Board, Column
from vicinal.report.canvas import figure_png, inline_svg
from vicinal.report.plots import LineStyle

Styles = Mapping[str, LineStyle]
# Of these a stream says something; the time of a training it does not.
QUALITIES = ("accuracy", "error", "ece", "nll", "brier")
KINDS = ("curves", "batch-size", "reliability", "ece", "cost")


@dataclass(frozen=True)
class Panel:
    """A drawing with its caption."""

    caption: str
    svg: str


@dataclass(frozen=True)
class Picture:
    """One figure: its place on the page, its panels, and its files."""

    kind: str
    name: str  # of its files, without the ending
    heading: str
    panels: list[Panel]
    png: bytes
    csv: str


def pictures_of(board: Board, styles: Styles) -> list[Picture]:
    """Return every figure that the records have data for."""
    columns = [column for column in board.columns if column.metric in QUALITIES and column.complete]
    made = [maker(column, styles) for maker, metrics in _MAKERS.items() for column in _once(columns, metrics)]
    made += [_batch_sizes(family, styles) for family in series.batch_sizes_of(board)]
    found = [picture for picture in made if picture is not None]
    return sorted(_named_apart(found), key=lambda picture: KINDS.index(picture.kind))


def _once(columns: Sequence[Column], metrics: Sequence[str]) -> list[Column]:
    """Return the columns to draw: of those that show the same runs the ones of the metrics, if any are."""
    runs = {column.name: {_run(record) for record in column.records} for column in columns}
    apt = [column for column in columns if column.metric in metrics]
    taken = set[tuple[object, ...]]().union(*(runs[column.name] for column in apt))
    return [column for column in columns if column in apt or not runs[column.name] & taken]


def _run(record: Record) -> tuple[object, ...]:
    """Return what tells a run from others, whichever column shows it."""
    return benchmark_of(record).get("key", id(record)), record.target


def _curves(column: Column, styles: Styles) -> Picture | None:
    lines = series.curves_of(column)
    shown = [line for line in lines if line.row in styles and len(line.mean) > 1]
    if not shown:
        return None
    panels = [
        Panel(
            target,
            _drawn(
                figures.draw_curves([line for line in shown if line.target == target], styles, titled=False),
                f"{column.name}, target {target}: accuracy so far along the stream. "
                + _at_the_end([line for line in shown if line.target == target]),
            ),
        )
        for target in dict.fromkeys(line.target for line in shown)
    ]
    head = ("row", "target", "images", "mean_percent", "std_percent", "seeds")
    body = (
        (line.row, line.target, line.images[i], line.mean[i], line.std[i] if line.std else None, line.seeds)
        for line in lines
        for i in range(len(line.mean))
    )
    whole = figures.draw_curves(shown, styles)
    return Picture(
        "curves", f"curves-{column.name}", column.name, panels, figure_png(whole), _csv(head, body)
    )


def _at_the_end(lines: Iterable[series.Curve]) -> str:
    return "At its end: " + ", ".join(f"{line.row} {line.mean[-1]:.1f}%" for line in lines) + "."


def _reliability(column: Column, styles: Styles) -> Picture | None:
    bins = series.reliabilities_of(column)
    shown = sorted((b for b in bins if b.row in styles), key=lambda b: list(styles).index(b.row))
    if not shown:
        return None
    panels = [
        Panel(
            one.row,
            _drawn(
                figures.draw_reliability([one], styles, titled=False),
                f"{column.name}, {one.row}: accuracy against confidence; calibration error {one.ece:.1f}%",
            ),
        )
        for one in shown
    ]
    head = ("row", "bin", "images", "confidence", "accuracy")
    body = (
        (one.row, i, *values)
        for one in bins
        for i, values in enumerate(zip(one.count, one.confidence, one.accuracy, strict=True))
    )
    whole = figures.draw_reliability(shown, styles)
    name = f"reliability-{column.name}"
    return Picture("reliability", name, column.name, panels, figure_png(whole), _csv(head, body))


def _errors(column: Column, styles: Styles) -> Picture | None:
    errors = series.errors_of(column)
    label = f"{column.name}: expected calibration error of every row, the lowest on top"
    head = ("row", "ece_percent", "std_percent", "seeds", "by_chance_percent")
    body = (
        (row, one.found.mean, one.found.std, one.found.count, one.by_chance) for row, one in errors.items()
    )
    drawing = figures.draw_errors(errors, styles)
    panels = [Panel("", _drawn(drawing, label))]
    return Picture("ece", f"ece-{column.name}", column.name, panels, figure_png(drawing), _csv(head, body))


def _costs(column: Column, styles: Styles) -> Picture | None:
    points = series.costs_of(column)
    label = f"{column.name}: accuracy against milliseconds per image"
    head = ("row", "seconds_per_image", "accuracy_percent", "std_percent", "seeds")
    body = ((point.row, point.x, point.y.mean, point.y.std, point.y.count) for point in points)
    panels = [Panel("", _drawn(figures.draw_costs(points, styles), label))]
    whole = figures.draw_costs(points, styles, titled=True)
    return Picture("cost", f"cost-{column.name}", column.name, panels, figure_png(whole), _csv(head, body))


def _batch_sizes(family: series.BatchSizes, styles: Styles) -> Picture | None:
    if not any(row in styles for row in family.lines):
        return None
    label = f"{family.name}: {family.metric} over batch sizes"
    head = ("row", "batch_size", family.metric, "std", "seeds", "paper")
    body = (
        (row, int(point.x), point.y.mean, point.y.std, point.y.count, point.paper)
        for row, points in family.lines.items()
        for point in points
    )
    panels = [Panel("", _drawn(figures.draw_batch_sizes(family, styles), label))]
    whole = figures.draw_batch_sizes(family, styles, titled=True)
    name = f"batch-size-{family.name}"
    return Picture("batch-size", name, family.name, panels, figure_png(whole), _csv(head, body))


def _drawn(figure: Figure, label: str) -> str:
    return inline_svg(figure, label)


def _csv(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """Return lines of values; a number in full, nothing where there is none."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(body)
    return buffer.getvalue()


# What each figure is about: columns of that metric have it, where others show the same runs.
_MAKERS: Mapping[Callable[[Column, Styles], Picture | None], Sequence[str]] = {
    _curves: ("accuracy", "error"),
    _reliability: ("ece",),
    _errors: ("ece",),
    _costs: ("accuracy", "error"),
}


def _named_apart(pictures: Sequence[Picture]) -> list[Picture]:
    """Return the pictures under file names that any system takes, no two alike."""
    taken: dict[str, int] = {}
    named = []
    for picture in pictures:
        stem = re.sub(r"[^a-z0-9]+", "-", picture.name.lower()).strip("-")
        taken[stem] = taken.get(stem, 0) + 1
        stem = stem if taken[stem] == 1 else f"{stem}-{taken[stem]}"
        named.append(Picture(**{**vars(picture), "name": stem}))
    return named
