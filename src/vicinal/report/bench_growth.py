"""How the cost of a step grows: a panel for each axis, time and, where it was measured, memory."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vicinal.benchmarks.bench.records import BenchRecord
from vicinal.report.bench_rows import growth_groups
from vicinal.report.canvas import PALETTE, grid, legend, panel_title

AXES = {
    "classes": "classes",
    "size": "pixels a side",
    "batch": "images of each batch",
    "domains": "source domains",
    "backbone": "million parameters",
}
Value = Callable[[BenchRecord], float | None]


def _milliseconds(record: BenchRecord) -> float | None:
    return None if record.seconds is None else 1e3 * record.seconds


def _gibibytes(record: BenchRecord) -> float | None:
    return None if record.peak_bytes is None else record.peak_bytes / 2**30


def growth_figure(records: Sequence[BenchRecord]) -> Figure | None:
    """Return time and memory against each axis, a line for each step; None without any growth records."""
    groups = growth_groups(records)
    measures: list[tuple[str, Value]] = [("ms", _milliseconds)]
    if any(record.peak_bytes is not None for members in groups.values() for record in members):
        measures.append(("GiB at most", _gibibytes))
    axes_here = [axis for axis in AXES if any(group.startswith(f"{axis}: ") for group in groups)]
    if not axes_here:
        return None
    subjects = dict.fromkeys(group.partition(": ")[2] for group in groups)
    colours = dict(zip(subjects, PALETTE, strict=False))
    # Time above, memory below.
    figure, panels = grid(len(axes_here) * len(measures), width=2.7, height=2.3, across=len(axes_here))
    places = [(unit, value, axis) for unit, value in measures for axis in axes_here]
    for ax, (unit, value, axis) in zip(panels, places, strict=True):
        for subject, colour in colours.items():
            _draw(ax, axis, groups.get(f"{axis}: {subject}", ()), value, subject, colour)
        ax.set(xlabel=AXES[axis], ylabel=unit, ylim=(0, 1.1 * ax.get_ylim()[1]))
        panel_title(ax, axis if axis != "backbone" else "parameters")
    legend(figure, panels)
    return figure


def _draw(
    ax: Axes, axis: str, members: Sequence[BenchRecord], value: Value, subject: str, colour: str
) -> None:
    points = [(_place(axis, record), value(record)) for record in members]
    points = [(x, y) for x, y in points if y is not None]
    if points:
        xs, ys = zip(*sorted(points), strict=True)
        ax.plot(xs, ys, color=colour, lw=1.6, marker="o", ms=4, label=subject)
        ax.set_xticks(xs, [f"{x:.3g}" for x in xs])


def _place(axis: str, record: BenchRecord) -> float:
    return record.parameters / 1e6 if axis == "backbone" else float(record.name)
