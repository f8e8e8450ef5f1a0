"""Figure data to figures: panels for a page, or all panels with titles and a legend for a file."""

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from vicinal.benchmarks.metric import METRICS
from vicinal.report.board import Board
from vicinal.report.canvas import GRID, INK, PALETTE, PAPER, RULE, SOFT, fit_limits, grid, legend, panel_title
from vicinal.report.plots import LineStyle
from vicinal.report.series import BatchSizes, Curve, Error, Point, Reliability

_CURVE_POINTS = 120
# Inches of a figure that stands alone: its letters can be read on a phone and are not shouting on a desk.
_WIDE = 4.2
_LABEL = 26  # letters of a row's name in a line
Styles = Mapping[str, LineStyle]


def row_styles(board: Board) -> dict[str, LineStyle]:
    """Return a style for each row worth drawing: references, the paper's method, then the best of the others.

    Best by rank: how many rows of a column one is behind, averaged over columns. Two rows of each method come
    before a third of any, so that a table of one method's variants still shows its rivals.
    """
    references = dict.fromkeys(column.reference for column in board.columns if column.reference is not None)
    ranks: dict[str, list[int]] = {}
    for column in board.columns:
        sign = -1 if column.reading.higher_is_better else 1
        means = {row: sign * cell.summary.mean for row, cell in column.complete.items() if cell.summary}
        for row, mean in means.items():
            ranks.setdefault(row, []).append(sum(other < mean for other in means.values()))
    others = [row for row in ranks if row not in references]
    others.sort(key=lambda row: (row not in board.ours, float(np.mean(ranks[row]))))
    turns = _turns(others, board)
    others.sort(key=lambda row: turns[row])
    styles = {row: LineStyle(row, INK, dashed=True) for row in references}
    return styles | {row: LineStyle(row, colour) for row, colour in zip(others, PALETTE, strict=False)}


def _turns(rows: Sequence[str], board: Board) -> dict[str, int]:
    """Return for every row how many pairs of rows of its method come before it."""
    methods = {row: cell.records[0].method for c in board.columns for row, cell in c.measured.items()}
    before: Counter[str] = Counter()
    turns = {}
    for row in rows:
        turns[row] = before[methods[row]] // 2
        before[methods[row]] += 1
    return turns


def draw_curves(curves: Sequence[Curve], styles: Styles, titled: bool = True) -> Figure:
    """Return accuracy so far along the stream: a panel per target, a line per row, bands of ± 1 std."""
    targets = list(dict.fromkeys(curve.target for curve in curves))
    figure, axes = grid(len(targets), width=3.6, height=2.5)
    for ax, target in zip(axes, targets, strict=True):
        shown = [curve for curve in curves if curve.target == target and curve.row in styles]
        _curve_panel(ax, shown, styles)
        ax.set(xlabel="images so far", ylabel="accuracy so far, %")
        if titled:
            panel_title(ax, target)
    if titled:
        legend(figure, axes)
    return figure


def _curve_panel(ax: Axes, curves: Sequence[Curve], styles: Styles) -> None:
    settled: list[NDArray[np.float64]] = []
    for curve in sorted(curves, key=lambda curve: list(styles).index(curve.row)):
        style = styles[curve.row]
        at = np.unique(np.linspace(0, len(curve.mean) - 1, _CURVE_POINTS).round().astype(int))
        images, mean = np.array(curve.images)[at], np.array(curve.mean)[at]
        std = np.zeros(len(at)) if curve.std is None else np.array(curve.std)[at]
        dashes = (0, (4, 2)) if style.dashed else "-"
        ax.plot(images, mean, color=style.color, lw=1.6, ls=dashes, label=style.label, zorder=3)
        if curve.std is not None:
            ax.fill_between(images, mean - std, mean + std, color=style.color, alpha=0.1, lw=0, zorder=2)
        late = len(at) // 4
        settled += [mean[late:] - std[late:], mean[late:] + std[late:]]
    fit_limits(ax, settled, max((curve.images[-1] for curve in curves), default=2))


def draw_reliability(panels: Sequence[Reliability], styles: Styles, titled: bool = True) -> Figure:
    """Return accuracy against confidence, a panel per row; a dot's area is its bin's share of the images."""
    shown = [panel for panel in panels if panel.row in styles]
    shown.sort(key=lambda panel: list(styles).index(panel.row))
    figure, axes = grid(len(shown), width=2.1, height=2.1)
    for ax, panel in zip(axes, shown, strict=True):
        _reliability_panel(ax, panel, styles[panel.row].color)
        ax.set(xlabel="confidence, %", ylabel="accuracy, %")
        if titled:
            panel_title(ax, textwrap.fill(panel.row, 22))
    return figure


def _reliability_panel(ax: Axes, panel: Reliability, colour: str) -> None:
    count = np.array(panel.count)
    filled = count > 0
    x, y = (100 * np.array(values)[filled] for values in (panel.confidence, panel.accuracy))
    ax.plot([0, 100], [0, 100], color=SOFT, lw=0.9, ls=(0, (3, 3)), zorder=1)
    ax.vlines(x, np.minimum(x, y), np.maximum(x, y), color=colour, alpha=0.35, lw=1.2, zorder=2)
    ax.plot(x, y, color=colour, lw=1, alpha=0.8, zorder=3, clip_on=False)
    ax.scatter(
        x, y, s=6 + 160 * count[filled] / count.sum(), color=colour, lw=0, alpha=0.85, zorder=4, clip_on=False
    )
    ax.text(5, 95, f"ECE {panel.ece:.1f}", va="top", ha="left", fontsize=9, color=INK)
    ax.set(xlim=(0, 102), ylim=(0, 102), xticks=(0, 50, 100), yticks=(0, 50, 100), aspect="equal")


def draw_errors(errors: Mapping[str, Error], styles: Styles) -> Figure:
    """Return the calibration error of each row as a bar, lowest on top, with whiskers of ± 1 std.

    A dotted line across a bar is the part of it that chance alone would make.
    """
    finite = {row: one.found for row, one in errors.items() if math.isfinite(one.found.mean)}
    rows = sorted(finite, key=lambda row: finite[row].mean)
    names = [textwrap.fill(row, _LABEL).replace("$", r"\$") for row in rows]
    lines = [name.count("\n") + 1 for name in names]
    places = np.cumsum(lines) - np.array(lines) / 2
    figure, (ax,) = grid(1, width=_WIDE, height=0.7 + 0.19 * sum(lines))
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color=GRID, lw=0.8)
    for place, row in zip(places, rows, strict=True):
        colour = styles[row].color if row in styles else RULE
        found, chance = finite[row], errors[row].by_chance
        ax.barh(place, found.mean, height=0.66, color=colour, lw=0, zorder=3)
        if found.std is not None and math.isfinite(found.std):
            ax.errorbar(found.mean, place, xerr=found.std, color=INK, lw=0.9, capsize=2, zorder=4)
        if math.isfinite(chance):
            ax.vlines(chance, place - 0.42, place + 0.42, color=INK, lw=1.1, ls=(0, (1, 1)), zorder=5)
    ax.set(xlabel="expected calibration error, %", ylim=(sum(lines), 0), xlim=(0, None))
    ax.set_yticks(places, names, linespacing=1.0)
    return figure


def draw_costs(points: Sequence[Point], styles: Styles, titled: bool = False) -> Figure:
    """Return accuracy against milliseconds per image; rows without a style are small grey dots."""
    figure, (ax,) = grid(1, width=_WIDE, height=2.9)
    drawn = [point for point in points if math.isfinite(point.x) and math.isfinite(point.y.mean)]
    for point in sorted(drawn, key=lambda point: point.row in styles):
        style = styles.get(point.row)
        colour, size = (style.color, 46) if style else (SOFT, 16)
        face = PAPER if style is not None and style.dashed else colour
        ax.scatter(
            1000 * point.x,
            point.y.mean,
            s=size,
            color=face,
            edgecolor=colour,
            lw=1.4,
            zorder=4 if style else 3,
            label=point.row if style else None,
        )
        if point.y.std is not None:
            ax.errorbar(1000 * point.x, point.y.mean, yerr=point.y.std, color=colour, lw=1, alpha=0.6)
    ax.set(xscale="log", xlabel="milliseconds per image, log scale", ylabel="accuracy, %")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    if titled:
        legend(figure, [ax])
    return figure


def draw_batch_sizes(family: BatchSizes, styles: Styles, titled: bool = False) -> Figure:
    """Return a metric over batch sizes: a line per row with whiskers of ± 1 std, the paper's dotted."""
    figure, (ax,) = grid(1, width=_WIDE, height=2.9)
    for row in (row for row in styles if row in family.lines):
        points, style = family.lines[row], styles[row]
        sizes, means = [point.x for point in points], [point.y.mean for point in points]
        dashes = (0, (4, 2)) if style.dashed else "-"
        ax.errorbar(
            sizes,
            means,
            yerr=[point.y.std or 0.0 for point in points],
            color=style.color,
            lw=1.6,
            ls=dashes,
            marker="o",
            ms=4,
            capsize=2,
            label=row,
        )
        printed = [(point.x, point.paper) for point in points if point.paper is not None]
        if printed:
            ax.plot(
                *zip(*printed, strict=True), color=style.color, lw=1.2, ls=":", marker="s", ms=4, mfc=PAPER
            )
    every = sorted({point.x for points in family.lines.values() for point in points})
    ax.set(xscale="log", xlabel="batch size", ylabel=f"{family.metric.replace('_', ' ')}, {_unit(family)}")
    ax.set_xticks(every, [f"{size:g}" for size in every])
    ax.xaxis.set_minor_locator(NullLocator())
    if titled:
        legend(figure, [ax])
    return figure


def _unit(family: BatchSizes) -> str:
    return METRICS[family.metric].unit
