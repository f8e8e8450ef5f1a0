"""Records to figures: each function returns a matplotlib Figure, without pyplot's global state."""

import base64
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vicinal.errors import DataError, UnknownNameError
from vicinal.evaluation.record import Record
from vicinal.report.tables import Row, Setup, labels, latest, percent, reference, setup_of, summarise

# Okabe and Ito's palette, made for every kind of colour vision; wine red in place of its yellow, which is
# too pale on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255")
INK, RULE = "#333333", "#d9d9d9"
MAX_LINES = 1 + len(PALETTE)
_CURVE_POINTS = 240
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


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
    figure, axes = _grid(len(panels), width=3.6, height=2.5)
    for ax, (name, members) in zip(axes, panels.items(), strict=True):
        _draw_curves(ax, members, styles)
        ax.set(xlabel="step", ylabel="accuracy so far, %")
        if not bare:
            _title(ax, name)
    if not bare:
        _legend(figure, axes)
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
    _limits(ax, settled, longest)


def _limits(ax: Axes, settled: Sequence[NDArray[np.float64]], longest: int) -> None:
    # The first quarter is a mean over few images: left to set the scale it would flatten all that follows.
    values = np.concatenate(settled) if settled else np.array([0.0, 100.0])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 100.0)
    margin = max(1.0, 0.08 * (high - low))
    ax.set_ylim(max(0.0, low - margin), min(100.0, high + margin))
    ax.set_xlim(1, max(longest, 2))


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
    figure, axes = _grid(len(panels), width=2.1, height=2.1)
    for ax, (setup, members) in zip(axes, panels.items(), strict=True):
        _draw_reliability(ax, members, styles[setup].color)
        ax.set(xlabel="confidence, %", ylabel="accuracy, %")
        if not bare:
            _title(ax, styles[setup].label)
    return figure


def _draw_reliability(ax: Axes, records: Sequence[Record], color: str) -> None:
    count, confidence, accuracy = pooled_bins(records)
    ax.plot([0, 100], [0, 100], color="#999999", lw=0.9, ls=(0, (3, 3)), zorder=1)
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


def _grid(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels in rows of at most three, drawn quietly."""
    columns = min(max(count, 1), 3)
    rows = -(-max(count, 1) // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", facecolor="white")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(RULE)
        ax.tick_params(color=RULE, labelcolor=INK, labelsize=9, length=3)
        ax.grid(axis="y", color="#eeeeee", lw=0.8)
        ax.set_axisbelow(True)
        ax.xaxis.label.set(color=INK, fontsize=9)
        ax.yaxis.label.set(color=INK, fontsize=9)
    return figure, axes


def _title(ax: Axes, text: str) -> None:
    ax.set_title(text, loc="left", parse_math=False, color=INK, fontsize=10, fontweight="bold")


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    # A line may be missing from the first panel: that setup was not run on every target.
    handles: dict[str, Artist] = {}
    for ax in axes:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    if handles:
        names = [name.replace("$", r"\$") for name in handles]
        figure.legend(handles.values(), names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def figure_data_uri(figure: Figure) -> str:
    """Return the figure as an SVG data URI: sharp at any size, the same bytes for the same figure.

    Letters stay text in the reader's system font, as on the page around it.
    """
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "vicinal"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    style = f"<style>text {{ font-family: {_FONTS} !important; }}</style>"
    svg = buffer.getvalue().decode().replace("<defs>", f"<defs>{style}", 1)
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
