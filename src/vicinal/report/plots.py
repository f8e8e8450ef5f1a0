"""Records to figures: each function returns a matplotlib Figure, without pyplot's global state."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vicinal.errors import DataError, UnknownNameError
from vicinal.evaluation.record import Record
from vicinal.report.canvas import INK, PALETTE, SOFT, figure_data_uri, fit_limits, grid, legend, panel_title
from vicinal.report.tables import Row, Setup, labels, latest, percent, reference, setup_of, summarise

__all__ = [
    "MAX_LINES",
    "PALETTE",
    "LineStyle",
    "curves",
    "figure_data_uri",
    "line_styles",
    "pooled_bins",
    "reliability_diagram",
]

MAX_LINES = 1 + len(PALETTE)
_CURVE_POINTS = 240


@dataclass(frozen=True)
class LineStyle:
    """How one setup is drawn in every figure of a report."""

    label: str
    color: str
    dashed: bool = False


def line_styles(records: Sequence[Record], highlight: Sequence[str] = ()) -> dict[Setup, LineStyle]:
    """Return a style for each setup worth drawing, ERM first, then by falling accuracy; at most MAX_LINES.

    `highlight` names the methods (or labels) to draw; without it the most accurate ones are.
    """
    rows = summarise(records)
    names = labels(row.setup for row in rows)
    known = {name for setup, label in names.items() for name in (setup.method, label)}
    for name in highlight:
        if name not in known:
            raise UnknownNameError("method to highlight", name, known)
    scores: dict[Setup, list[float]] = {}
    for row in rows:
        scores.setdefault(row.setup, []).append(float(np.nan_to_num(row.accuracy_mean)))
    erm = dict.fromkeys(row.setup for row in _references(rows))
    others = [s for s in scores if s not in erm and (not highlight or {s.method, names[s]} & set(highlight))]
    others.sort(key=lambda setup: -statistics.fmean(scores[setup]))
    styles = {setup: LineStyle(names[setup], INK, dashed=True) for setup in erm}
    drawn = zip(others, PALETTE, strict=False)
    return styles | {setup: LineStyle(names[setup], color) for setup, color in drawn}


def _references(rows: Sequence[Row]) -> list[Row]:
    found = (reference(rows, stream) for stream in dict.fromkeys(row.stream for row in rows))
    return [row for row in found if row is not None]


def curves(
    records: Sequence[Record], styles: Mapping[Setup, LineStyle] | None = None, bare: bool = False
) -> Figure:
    """Return the cumulative accuracy after each step: a panel per target, mean and ± 1 std over seeds.

    A bare figure has no titles and no legend; what shows it must name its panels and lines.
    """
    records = latest(records)
    styles = line_styles(records) if styles is None else styles
    several = len({record.stream for record in records}) > 1
    panels: dict[str, list[Record]] = {}
    for record in records:
        name = f"{record.target}, {record.stream}" if several else record.target
        panels.setdefault(name, []).append(record)
    figure, axes = grid(len(panels), width=3.6, height=2.5)
    for ax, (name, members) in zip(axes, panels.items(), strict=True):
        _draw_curves(ax, members, styles)
        ax.set(xlabel="step", ylabel="accuracy so far, %")
        if not bare:
            panel_title(ax, name)
    if not bare:
        legend(figure, axes)
    return figure


def _draw_curves(ax: Axes, records: Sequence[Record], styles: Mapping[Setup, LineStyle]) -> None:
    settled: list[NDArray[np.float64]] = []
    longest = 1
    for setup, style in styles.items():
        members = [record.curve for record in records if setup_of(record) == setup and record.curve]
        if not members:
            continue
        # Under label shift the streams of two seeds differ in length; the mean needs all of them.
        length = min(map(len, members))
        seeds = 100 * np.array([curve[:length] for curve in members])
        at = np.unique(np.linspace(0, length - 1, _CURVE_POINTS).round().astype(int))
        mean = seeds.mean(axis=0)[at]
        dashes = (0, (4, 2)) if style.dashed else "-"
        ax.plot(at + 1, mean, color=style.color, lw=1.6, ls=dashes, label=style.label, zorder=3)
        std = seeds.std(axis=0, ddof=1)[at] if len(members) > 1 else np.zeros(len(at))
        ax.fill_between(at + 1, mean - std, mean + std, color=style.color, alpha=0.08, lw=0, zorder=2)
        late = len(at) // 4
        settled += [mean[late:] - std[late:], mean[late:] + std[late:]]
        longest = max(longest, length)
    fit_limits(ax, settled, longest)


def reliability_diagram(
    records: Sequence[Record], styles: Mapping[Setup, LineStyle] | None = None, bare: bool = False
) -> Figure:
    """Return accuracy against confidence, a panel per setup, its bins pooled over the records.

    A dot's area is the bin's share of the images; the diagonal is perfect calibration.
    """
    records = latest(records)
    styles = line_styles(records) if styles is None else styles
    panels = {s: [record for record in records if setup_of(record) == s] for s in styles}
    panels = {setup: members for setup, members in panels.items() if members}
    figure, axes = grid(len(panels), width=2.1, height=2.1)
    for ax, (setup, members) in zip(axes, panels.items(), strict=True):
        _draw_reliability(ax, members, styles[setup].color)
        ax.set(xlabel="confidence, %", ylabel="accuracy, %")
        if not bare:
            panel_title(ax, styles[setup].label)
    return figure


def _draw_reliability(ax: Axes, records: Sequence[Record], color: str) -> None:
    count, confidence, accuracy = pooled_bins(records)
    ax.plot([0, 100], [0, 100], color=SOFT, lw=0.9, ls=(0, (3, 3)), zorder=1)
    filled = count > 0
    x, y = 100 * confidence[filled], 100 * accuracy[filled]
    share = count[filled] / max(count.sum(), 1)
    ax.vlines(x, np.minimum(x, y), np.maximum(x, y), color=color, alpha=0.35, lw=1.2, zorder=2)
    ax.plot(x, y, color=color, lw=1, alpha=0.8, zorder=3)
    ax.scatter(x, y, s=6 + 160 * share, color=color, lw=0, alpha=0.85, zorder=4)
    # The table's ECE, a mean over runs, rather than that of the pooled bins, which would differ from it.
    error = statistics.fmean(row.ece_mean for row in summarise(records))
    ax.text(5, 95, f"ECE {percent(error)}", va="top", ha="left", fontsize=9, color=INK)
    ax.set(xlim=(0, 102), ylim=(0, 102), xticks=(0, 50, 100), yticks=(0, 50, 100), aspect="equal")


def pooled_bins(records: Sequence[Record]) -> tuple[NDArray[np.float64], ...]:
    """Return count, mean confidence and accuracy per bin over all images of the records."""
    if len({len(record.reliability["count"]) for record in records}) > 1:
        raise DataError("these records cut confidence into different numbers of bins: report them apart")
    counts = np.array([record.reliability["count"] for record in records])
    total = counts.sum(axis=0)
    weights = counts / np.maximum(total, 1)
    confidence, accuracy = (
        (weights * np.array([record.reliability[name] for record in records])).sum(axis=0)
        for name in ("confidence", "accuracy")
    )
    return total, confidence, accuracy
