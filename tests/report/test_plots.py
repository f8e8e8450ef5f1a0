import base64
import math
import re
from collections.abc import Callable
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest

from vicinal.errors import DataError, UnknownNameError
from vicinal.evaluation.record import Record
from vicinal.report.plots import (
    MAX_LINES,
    curves,
    figure_data_uri,
    line_styles,
    pooled_bins,
    reliability_diagram,
)
from vicinal.report.tables import setup_of

MakeRecord = Callable[..., Record]


def contrast_with_white(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 1.05 / (0.05 + float(np.dot(linear, (0.2126, 0.7152, 0.0722))))


def test_erm_leads_and_the_rest_follow_by_accuracy(make: MakeRecord) -> None:
    records = [make(method=f"m{i}", accuracy=i / 100) for i in range(12)] + [make(accuracy=0.01)]
    styles = list(line_styles(records).values())
    assert [style.label for style in styles] == ["ERM"] + [f"m{i}" for i in range(11, 4, -1)]
    assert len(styles) == MAX_LINES == 8
    assert [style.dashed for style in styles] == [True] + [False] * 7
    assert len({style.color for style in styles}) == 8
    assert min(contrast_with_white(style.color) for style in styles) > 2


def test_highlighted_methods_are_drawn_beside_erm(make: MakeRecord) -> None:
    records = [make(method=f"m{i}", accuracy=i / 100) for i in range(12)] + [make()]
    assert [style.label for style in line_styles(records, ["m1", "m3"]).values()] == ["ERM", "m3", "m1"]
    with pytest.raises(UnknownNameError, match="m99"):
        line_styles(records, ["m99"])


def test_curves_show_the_mean_over_seeds_per_target(make: MakeRecord) -> None:
    runs = {0: [0.2, 0.4, 0.6], 1: [0.4, 0.4, 0.8, 0.9]}
    records = [make(target=t, seed=s, curve=curve) for t in ("a", "$b$") for s, curve in runs.items()]
    figure = curves(records)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["a", "$b$"]
    [line] = figure.axes[0].get_lines()
    assert line.get_xdata() == pytest.approx([1, 2, 3])
    assert line.get_ydata() == pytest.approx([30, 40, 70])
    [band] = figure.axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((30 - 10 * math.sqrt(2), 70 + 10 * math.sqrt(2)))


def test_a_long_curve_is_thinned_but_keeps_its_ends(make: MakeRecord) -> None:
    [line] = curves([make(curve=list(np.linspace(0, 1, 5000)))]).axes[0].get_lines()
    x = np.asarray(line.get_xdata())
    assert len(x) < 300
    assert (x[0], x[-1]) == (1, 5000)
    assert np.asarray(line.get_ydata())[-1] == pytest.approx(100)


def test_the_legend_names_every_line_outside_the_panels(make: MakeRecord) -> None:
    records = [make(), make(method="tent"), make(method="t3a", target="other")]
    [legend] = curves(records).legends
    assert {text.get_text() for text in legend.get_texts()} == {"ERM", "tent", "t3a"}
    bare = curves(records, bare=True)
    assert not bare.legends
    assert all(not ax.get_title(loc="left") for ax in bare.axes)


@pytest.mark.parametrize("curve", [[], [0.5], [math.nan, math.nan]])
def test_curves_without_much_to_show_still_draw(make: MakeRecord, curve: list[float]) -> None:
    assert figure_data_uri(curves([make(curve=curve)])).startswith("data:image/svg+xml;base64,")


def test_several_streams_get_panels_of_their_own(make: MakeRecord) -> None:
    figure = curves([make(), make(stream="label_shift")])
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["90, online", "90, label_shift"]


def test_bins_are_pooled_by_images_not_by_runs(make: MakeRecord) -> None:
    few = make(reliability={"count": [1.0, 0.0], "confidence": [0.5, 0.0], "accuracy": [1.0, 0.0]})
    many = make(seed=1, reliability={"count": [3.0, 0.0], "confidence": [0.1, 0.0], "accuracy": [0.0, 0.0]})
    count, confidence, accuracy = pooled_bins([few, many])
    assert count == pytest.approx([4, 0])
    assert confidence == pytest.approx([0.2, 0])
    assert accuracy == pytest.approx([0.25, 0])
    with pytest.raises(DataError, match="bins"):
        pooled_bins([few, make()])


def test_the_reliability_diagram_draws_filled_bins_only(make: MakeRecord) -> None:
    records = [make(ece=0.1), make(seed=1, ece=0.2), make(method="tent")]
    figure = reliability_diagram(records)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["ERM", "tent"]
    dots = figure.axes[0].collections[-1].get_offsets()
    assert np.asarray(dots) == pytest.approx(np.array([[20, 0], [90, 100]]))
    assert [text.get_text() for text in figure.axes[0].texts] == ["ECE 15.0"]
    styles = line_styles(records)
    only = {setup_of(records[2]): styles[setup_of(records[2])]}
    assert len(reliability_diagram(records, only).axes) == 1


def test_a_figure_becomes_the_same_self_contained_svg_each_time(make: MakeRecord) -> None:
    records = [make(), make(method="a<b>&", accuracy=0.6), make(method="a<b>&", accuracy=0.7, seed=1)]
    first, second = (figure_data_uri(curves(records)) for _ in range(2))
    assert first == second
    svg = base64.b64decode(first.split(",", 1)[1]).decode()
    root = ElementTree.fromstring(svg)
    texts = {"".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"step", "a<b>&", "ERM"} <= texts
    assert "system-ui" in svg
    references = re.findall(r"""(?:href|src)=["']([^"']*)""", svg) + re.findall(r"url\(([^)]*)\)", svg)
    assert all(target.startswith("#") for target in references)


def test_drawing_leaves_global_settings_alone(make: MakeRecord) -> None:
    before = dict(mpl.rcParams)
    figure_data_uri(reliability_diagram([make(), make(seed=1)]))
    assert dict(mpl.rcParams) == before
