"""The tables on file are what their specs ask for: an option that changes a name would lose them silently."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from vicinal.adapters.vnl_settings import VOTES
from vicinal.benchmarks.plan import plan
from vicinal.benchmarks.spec import load_spec
from vicinal.benchmarks.store import Store

ROOT = Path(__file__).parents[2]
RESNET = {"backbone": "resnet50_v1", "weights": "resnet50_v1_imagenet.safetensors"}
FIGURES = re.compile(r'(?:href|src)="(figures/[^"]+)"')
# Folder of results: the spec, and what its command says besides. rotated-64px is of specs as they were.
TABLES: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "as-it-is": (str(ROOT / "benchmarks" / "as_it_is.toml"), {}),
        "as-it-is-pretrained": (
            str(ROOT / "benchmarks" / "as_it_is_pretrained.toml"),
            {"weights": "efficientnet-lite0.safetensors"},
        ),
        "ablation": ("ablation", {"only": ("pacs",), "seeds": 1, "iterations": 300, **RESNET}),
        "carried": (str(ROOT / "benchmarks" / "carried.toml"), {}),
        "complex_scenarios": ("complex_scenarios", RESNET),
        "inner-step": (str(ROOT / "benchmarks" / "inner_step.toml"), {}),
        "joint": (str(ROOT / "benchmarks" / "joint.toml"), {}),
        "pacs-lite": (
            str(ROOT / "benchmarks" / "pacs_lite.toml"),
            {"weights": "efficientnet-lite0.safetensors"},
        ),
        "pacs-longer": (
            str(ROOT / "benchmarks" / "pacs_longer.toml"),
            {"only": ("ERM, 4,000", "meta, 4,000"), **RESNET},
        ),
        "pacs-resnet50_v1": (str(ROOT / "benchmarks" / "pacs.toml"), RESNET),
        "pacs-rivals": (str(ROOT / "benchmarks" / "pacs_rivals.toml"), {"seeds": 1, **RESNET}),
        "rotated": ("rotated", RESNET),
        "shift_extent": ("shift_extent", RESNET),
        "views": (str(ROOT / "benchmarks" / "views.toml"), {"weights": "efficientnet-lite0.safetensors"}),
        "votes": (str(ROOT / "benchmarks" / "votes.toml"), {}),
    }
)
CHECKOUT = pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="not a checkout")


@CHECKOUT
@pytest.mark.parametrize("name", TABLES)
def test_a_table_on_file_is_what_its_spec_asks_for(name: str) -> None:
    spec, given = TABLES[name]
    asked = {(run.key, target) for run in plan(load_spec(spec), **given).measures for target in run.results}
    done = Store(ROOT / "results" / name).done()
    assert done <= asked, "records that no cell of the table asks for"
    assert asked == done


@CHECKOUT
def test_pages_on_file_link_to_no_figures_that_are_not() -> None:
    pages = list((ROOT / "results").glob("*/report.html"))
    assert pages
    dead = [
        page
        for page in pages
        for name in FIGURES.findall(page.read_text("utf-8"))
        if not (page.parent / name).is_file()
    ]
    assert dead == []


def test_the_row_of_ours_votes_as_left_out_streams_have_it_vote() -> None:
    spec = load_spec(str(ROOT / "benchmarks" / "pacs.toml"))
    (ours,) = (row for row in spec.rows if row.ours)
    assert dict(ours.options) == VOTES["rounds"]
