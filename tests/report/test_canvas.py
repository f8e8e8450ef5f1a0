import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from vicinal.report.canvas import COLOURS, INK, PALETTE, figure_png, grid, inline_svg, legend, panel_title


def drawn(title: str = "a panel") -> Figure:
    figure, (ax,) = grid(1, 3.0, 2.0)
    ax.plot([0, 1], [0.123456, 1.0], color=PALETTE[0], label="one")
    ax.scatter([0.5], [0.5], color=INK, clip_on=True)
    panel_title(ax, title)
    return figure


def test_an_inline_figure_takes_the_colours_of_the_page() -> None:
    svg = inline_svg(drawn(), "what it shows")
    assert "var(--line-1)" in svg
    assert "var(--ink)" in svg
    for colour in COLOURS:
        assert colour not in svg.lower(), "every colour of ours has a name on the page"


def test_an_inline_figure_stands_by_itself() -> None:
    svg = inline_svg(drawn("<b>&"), 'a "label" & <more>')
    root = ElementTree.fromstring(svg)
    assert root.attrib["aria-label"] == 'a "label" & <more>'
    assert root.attrib["role"] == "img"
    assert not {"width", "height"} & root.attrib.keys(), "it is as wide as its place"
    assert {element.tag for element in root.iter()}.isdisjoint({"style", "metadata", "script"})
    assert "http" not in svg
    assert "<b>" not in svg
    assert not re.search(r'(?<=[" ,])-?\d+\.\d{4,}', svg), "no digits that nobody sees"


def test_ids_of_two_figures_differ_and_references_hold() -> None:
    one, other = (inline_svg(drawn(), label) for label in ("one", "other"))
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (one, other)]
    assert ids[0].isdisjoint(ids[1])
    for svg, own in zip((one, other), ids, strict=True):
        used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
        assert used
        assert used <= own
    assert one == inline_svg(drawn(), "one")


def test_a_png_is_a_png() -> None:
    assert figure_png(drawn()).startswith(b"\x89PNG")


@pytest.mark.parametrize("names", [["a", "b"], ["a name that is as long as names of rows come, " * 2] * 2])
def test_a_legend_keeps_within_the_figure_and_leaves_the_panels_their_height(names: list[str]) -> None:
    figure, (ax,) = grid(1, 6.0, 2.0)
    for number, name in enumerate(names):
        ax.plot([0, 1], [0, number], label=f"{name}{number}")
    legend(figure, [ax])
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert ax.get_window_extent().height > 0.6 * 2.0 * figure.dpi
