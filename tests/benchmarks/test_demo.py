import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest

from vicinal.benchmarks.demo import DRAWS, HINDSIGHT, DemoConfig, best_in_hindsight, entries, smaller
from vicinal.evaluation.record import Record, read_records
from vicinal.report.tables import base_name, labels, summarise

RUN = "from vicinal.cli import main; main()"
Make = Callable[..., Record]


@pytest.fixture
def make() -> Make:
    """Return a maker of records of `soft` at a step size."""

    def build(lr: float, accuracy: float, **changes: Any) -> Record:
        values: dict[str, Any] = {
            "dataset": "digits", "target": "0", "backbone": "small", "algorithm": "erm", "method": "soft",
            "statistics": "batch", "predict": "own", "stream": "online", "seed": 0, "batch_size": 20,
            "accuracy": accuracy, "ece": 0.1, "nll": 1.0, "brier": 0.5, "curve": [accuracy], "seconds": 1.0,
            "images_per_second": 10.0, "reliability": {}, "protocol": {"adapter": {"lr": lr}}, "versions": {},
        }  # fmt: skip
        return Record(**(values | changes))

    return build


def test_the_best_step_size_is_best_on_the_mean(make: Make) -> None:
    low = [make(1e-4, 0.9, target="0"), make(1e-4, 0.1, target="90")]
    high = [make(1e-3, 0.6, target="0"), make(1e-3, 0.6, target="90")]
    assert best_in_hindsight([low[0], high[0], low[1], high[1]], ("soft",)) == high


def test_one_step_size_serves_all_seeds(make: Make) -> None:
    low = [make(1e-4, 0.5, seed=seed) for seed in (0, 1)]
    high = [make(1e-3, accuracy, seed=seed) for seed, accuracy in ((0, 0.3), (1, 0.8))]
    assert best_in_hindsight([*low, *high], ("soft",)) == high


@pytest.mark.parametrize(
    "change", [{"statistics": "stream"}, {"predict": "labels"}, {"algorithm": "meta"}, {"method": "hard"},
               {"stream": "label_shift"}],
)  # fmt: skip
def test_each_setup_has_a_best_of_its_own(make: Make, change: dict[str, str]) -> None:
    one = [make(1e-4, 0.9), make(1e-3, 0.2)]
    other = [make(1e-4, 0.2, **change), make(1e-3, 0.3, **change)]
    assert best_in_hindsight([*one, *other], HINDSIGHT) == [one[0], other[1]]


def test_methods_that_are_not_named_are_left_as_they_are(make: Make) -> None:
    vnl = [make(1e-4, 0.9, method="vnl"), make(1e-3, 0.2, method="vnl")]
    assert best_in_hindsight(vnl, HINDSIGHT) == vnl
    assert "vnl" not in HINDSIGHT
    assert best_in_hindsight([], HINDSIGHT) == []


def test_a_quick_demo_is_smaller() -> None:
    config = replace(DemoConfig(), seeds=(4, 7))
    assert smaller(config).seeds == (4,)
    assert smaller(config).iterations < config.iterations


def test_vnl_gets_no_favours() -> None:
    for algorithm in ("neighbor", "meta"):
        mine = [entry for entry in entries(algorithm) if entry.method == "vnl"]
        assert [entry.options for entry in mine] == [{}]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """Return the folder of a quick demo that ran in a process of its own, over an older result."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    folder.mkdir()
    (folder / "records.jsonl").write_text("of an older run\n")
    ran = subprocess.run(
        [sys.executable, "-c", RUN, "demo", "--quick", "--seed", "5", "--out", str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return folder, ran


@pytest.mark.slow
def test_the_demo_writes_a_record_of_every_entry(demo: Any) -> None:
    folder, ran = demo
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    every = read_records(folder / "records.jsonl")
    records = [record for record in every if record.stream == "online"]
    assert len(records) == 2 * (len(entries("neighbor")) + len(entries("meta")))
    assert {record.target for record in records} == {"0", "90"}
    assert {record.seed for record in records} == {5}
    shifted = [record for record in every if record.stream == "label_shift"]
    assert len({(record.target, record.seed) for record in shifted}) == 2 * DRAWS
    assert len({record.nll for record in shifted if record.method == "bn"}) == 2 * 2 * DRAWS
    wanted = {entry.method for algorithm in ("neighbor", "meta") for entry in entries(algorithm)}
    assert {record.method for record in records} == wanted
    assert {record.algorithm for record in records} == {"erm", "meta"}
    assert all(0 <= record.accuracy <= 1 and record.seconds > 0 for record in records)


@pytest.mark.slow
def test_the_page_of_the_demo_names_every_method(demo: Any) -> None:
    folder, ran = demo
    page = (folder / "report.html").read_text(encoding="utf-8")
    records = best_in_hindsight(read_records(folder / "records.jsonl"), HINDSIGHT)
    rows = summarise(records)
    assert {row.method for row in rows} == {record.method for record in records}
    for name in labels(row.setup for row in rows).values():
        assert name in ran.stdout, name
    heads = re.findall(r'<th scope="row" class="name">(.*?)<span class="detail">', page)
    shown = [re.sub(r"<[^>]*>", "", head).removesuffix("reference") for head in heads]
    for name, count in Counter(escape(base_name(row.setup)) for row in rows).items():
        assert shown.count(name) >= count, name
    assert "in hindsight" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert sorted(path.name for path in folder.iterdir()) == [
        "records.jsonl",
        "records.jsonl.old",
        "report.html",
    ]
