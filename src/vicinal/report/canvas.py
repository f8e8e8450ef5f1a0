"""What all figures share: colours, quiet panels, a legend, and the ways a figure leaves the program."""

import base64
import hashlib
import io
import re
import textwrap
from collections.abc import Sequence
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

# Okabe and Ito's palette, made for every kind of colour vision; wine red in place of its yellow, which is
# too pale on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255")
INK, RULE, GRID, SOFT, PAPER = "#333333", "#d9d9d9", "#eeeeee", "#999999", "#ffffff"
# What stands for each colour in a page that is light or dark as its reader likes it.
COLOURS = {colour.lower(): f"var(--line-{number})" for number, colour in enumerate(PALETTE, start=1)} | {
    INK: "var(--ink)",
    RULE: "var(--axis)",
    GRID: "var(--grid)",
    SOFT: "var(--soft)",
    PAPER: "var(--paper)",
}
_HEX = re.compile(r"#[0-9a-fA-F]{6}\b")
_REFERENCE = re.compile(r"(^#|url\(#)")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def grid(count: int, width: float, height: float, across: int = 3) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels in rows of at most `across`, drawn quietly."""
    columns = min(max(count, 1), across)
    rows = -(-max(count, 1) // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", facecolor="white")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(RULE)
        ax.tick_params(color=RULE, labelcolor=INK, labelsize=9, length=3)
        ax.grid(axis="y", color=GRID, lw=0.8)
        ax.set_axisbelow(True)
        ax.xaxis.label.set(color=INK, fontsize=9)
        ax.yaxis.label.set(color=INK, fontsize=9)
    return figure, axes


def panel_title(ax: Axes, text: str) -> None:
    """Set a panel's title."""
    ax.set_title(text, loc="left", parse_math=False, color=INK, fontsize=10, fontweight="bold")


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Set one legend below all panels, in room of its own.

    A line may be missing from the first panel: that setup was not run on every target.
    """
    handles: dict[str, Artist] = {}
    for ax in axes:
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    if handles:
        # At this size a letter takes about five and a half points, a handle with its gaps forty.
        room = 72 * figure.get_figwidth()
        columns = min(4, max(1, int(room // (40 + 5.5 * max(map(len, handles))))))
        names = [textwrap.fill(name, int((room - 40) / 5.5)).replace("$", r"\$") for name in handles]
        lines = -(-sum(name.count("\n") + 1 for name in names) // columns)
        figure.set_figheight(figure.get_figheight() + 0.18 * lines)  # or the panels would give up theirs
        look = {"ncols": columns, "frameon": False, "fontsize": 9}
        figure.legend(handles.values(), names, loc="outside lower center", **look)


def fit_limits(ax: Axes, settled: Sequence[NDArray[np.float64]], longest: int) -> None:
    """Scale a panel of percentages by what its lines settle to, from 1 to `longest`.

    The first quarter is a mean over few images: left to set the scale it would flatten all that follows.
    """
    values = np.concatenate(settled) if settled else np.array([0.0, 100.0])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 100.0)
    margin = max(1.0, 0.08 * (high - low))
    ax.set_ylim(max(0.0, low - margin), min(100.0, high + margin))
    ax.set_xlim(1, max(longest, 2))


def figure_data_uri(figure: Figure) -> str:
    """Return the figure as an SVG data URI: sharp at any size, the same bytes for the same figure.

    Letters stay text in the reader's system font, as on the page around it.
    """
    style = f"<style>text {{ font-family: {_FONTS} !important; }}</style>"
    svg = _svg(figure).replace("<defs>", f"<defs>{style}", 1)
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def figure_png(figure: Figure) -> bytes:
    """Return the figure as a PNG on white, sharp enough for print."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()


def inline_svg(figure: Figure, label: str) -> str:
    """Return the figure as an element of a page: it takes the page's colours, light or dark, and its font.

    Colours become the page's custom properties (`COLOURS`); `label` is read out in the figure's place.
    """
    root = ElementTree.fromstring(_svg(figure))
    prefix = "f" + hashlib.sha256(ElementTree.tostring(root) + label.encode()).hexdigest()[:8]
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
        parent.tag = parent.tag.partition("}")[2]
        parent.attrib = {
            name.partition("}")[2] or name: _of_page(name, value, prefix)
            for name, value in parent.attrib.items()
        }
    root.attrib = {"class": "drawing", "role": "img", "aria-label": label, "viewBox": root.attrib["viewBox"]}
    return ElementTree.tostring(root, encoding="unicode")


def _of_page(name: str, value: str, prefix: str) -> str:
    """Return an attribute as it can stand in a page: ids of its own, short numbers, the page's colours."""
    if name == "id":
        return f"{prefix}-{value}"
    value = _REFERENCE.sub(rf"\g<1>{prefix}-", value)
    if name in ("d", "points", "x", "y", "width", "height", "transform"):
        return _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.2f}", value)
    if name == "style":
        return _HEX.sub(lambda match: COLOURS.get(match[0].lower(), match[0]), value)
    return value


def _svg(figure: Figure) -> str:
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "vicinal"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue().decode()
