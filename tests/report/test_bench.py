"""Records of a bench as rows, README and plot."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vicinal.benchmarks.bench import goals
from vicinal.benchmarks.bench.records import SECTIONS, BenchRecord
from vicinal.report.bench import RANDOM, SMALLER, bench_tables, notes, readme, remarks, write_bench
from vicinal.report.bench_growth import growth_figure
from vicinal.report.bench_origin import command_of, origin_lines
from vicinal.report.bench_rows import (
    duration,
    goal_line,
    growth_rows,
    memory_line,
    profile_lines,
    sections,
    size,
)

SHAPE = {"backbone": "resnet18", "size": 224, "batch": 70, "stream_batch": 20, "classes": 7, "domains": 3}


def record(part: str, group: str, name: str, *rounds: float, **told: Any) -> BenchRecord:
    facts: dict[str, Any] = {
        "scale": "full",
        "judged": True,
        "device": "GPU",
        "shape": SHAPE,
        "images": 140,
        "versions": {"torch": "2.0"},
    }
    return BenchRecord(part, group, name, **{**facts, **told}, rounds=rounds)


RECORDS = [
    record("goals", "training", goals.PLAIN[0], 0.02, precision="tf32"),
    record("goals", "training", goals.PLAIN[3], error="RuntimeError: no | compiler"),
    record(
        "goals", "training", goals.ERM, 0.03, floor_arithmetic=0.01, floor_memory=0.002, peak_bytes=3 << 30
    ),
    record("goals", "training", goals.FIRST, 0.045),
    record("goals", "training", goals.UNROLLED, 0.05),
    record("goals", "training", goals.DOUBLE, 0.2),
    record("goals", "loop", goals.LOOP, 400.0, extra={"note": "extrapolated from 300"}),
    record("growth", "classes: ERM step", "7", 0.03, peak_bytes=1 << 30),
    record("growth", "classes: ERM step", "345", 0.036, peak_bytes=3 << 29),
    record("growth", "backbone: ERM step", "resnet18", 0.03, parameters=11_200_000, peak_bytes=1 << 30),
    record("growth", "backbone: ERM step", "resnet50", error="MemoryError", parameters=23_500_000),
    record("growth", "domains: iteration of the loop", "3", 0.05, extra={"left_out_models": 3}),
    record(
        "profile",
        "profile",
        goals.ERM,
        extra={"total": 30.0, "kinds": {"waiting": 6.0, "matrix products": 24.0}},
    ),
    record("profile", "profile", goals.FIRST, error="RuntimeError: no profiler"),
]


def rows() -> dict[str, tuple[str, ...]]:
    return {row.what: row.cells for _, part in sections(RECORDS) for row in part}


def test_a_case_stands_beside_what_it_is_held_against() -> None:
    found = rows()
    assert found["ERM step"] == (
        "ERM step",
        "30 ms",
        "1.50x plain ERM",
        "at most 1x: missed",
        "10 ms",
        "3.0x",
        "3.0 GiB",
    )
    assert found["VNL first order"][1:4] == ("45 ms", "1.50x ERM step", "at most 2x: met")
    assert found["unrolled, double backward"][2] == "4.00x unrolled, first order"
    assert found["10,000 VNL iterations"][1:4] == (
        "6.7 min",
        "the paper: 14.6 h on a 1080Ti",
        "at most 6.0 min: missed",
    )


@pytest.mark.parametrize(
    ("tent", "vnl", "told"),
    [
        (0.01, 0.013, "met: vnl without anchor: 1.30x tent, all parameters"),
        (0.01, 0.01304, "missed: vnl without anchor: 1.304x tent, all parameters"),
        (0.01, 0.0130002, "missed: vnl without anchor: 1.30002x tent, all parameters"),
        (0.01, 0.0152, "missed: vnl without anchor: 1.52x tent, all parameters"),
    ],
)
def test_a_narrow_miss_can_be_seen(tent: float, vnl: float, told: str) -> None:
    measured = [
        record("goals", "adaptation", goals.TENT, tent),
        record("goals", "adaptation", goals.VNL, vnl),
    ]
    judged = next(item for item in goals.judge(measured) if item.goal.subject == goals.VNL)
    assert goal_line(judged) == f"{told}; asked: at most 1.3x"


def test_how_far_rounds_lie_apart_can_be_seen() -> None:
    measured = [
        record("goals", "adaptation", goals.TENT, 0.010, 0.010, 0.010),
        record("goals", "adaptation", goals.VNL, 0.01302, 0.0129, 0.0131),
    ]
    judged = next(item for item in goals.judge(measured) if item.goal.subject == goals.VNL)
    told = "1.302x tent, all parameters (1.290 to 1.310)"
    assert goal_line(judged) == f"missed: vnl without anchor: {told}; asked: at most 1.3x"
    (_, rows), *_ = sections(measured)
    assert rows[1].against == told


def test_each_way_of_running_has_its_line() -> None:
    seconds = dict(zip(goals.PLAIN, (0.05, 0.04, 0.03, 0.03, 0.02, 0.025), strict=True))
    own = {goals.ERM: 0.027, goals.ERM + goals.COMPILED: 0.025}
    measured = [record("goals", "training", name, taken) for name, taken in {**seconds, **own}.items()]
    lines = readme(measured, "command", picture=False).splitlines()
    assert "- met: ERM step: 0.90x plain ERM, autocast, captured; asked: at most 1x" in lines
    against = "plain ERM, autocast, compiled, reduce-overhead"
    assert f"- missed: ERM step, compiled: 1.25x {against}; asked: at most 1x" in lines


def test_a_case_that_failed_says_why() -> None:
    assert rows()["plain ERM, autocast, compiled"][1] == "failed: RuntimeError: no | compiler"


def test_the_precision_is_named_where_it_is_known() -> None:
    assert "plain ERM (tf32)" in rows()


def test_growth_is_a_line_for_each_series() -> None:
    classes, backbone, domains = growth_rows(RECORDS)
    assert classes.what == "ERM step: classes 7, 345"
    assert (classes.time, classes.against) == ("30 ms, 36 ms", "1.00x, 1.20x the first")
    assert classes.memory == "1.0 GiB, 1.5 GiB"
    assert backbone.what == "ERM step: 11.2, 23.5 million parameters (resnet18, resnet50)"
    assert backbone.time == "30 ms, -; failed at resnet50: MemoryError"
    assert domains.against == "1.00x the first; left-out models 3"


def test_where_the_time_goes() -> None:
    erm, first = profile_lines(RECORDS)
    shares = "matrix products 80% (24.00 ms), the device waits 20% (6.00 ms)"
    assert erm == f"ERM step, 30.00 ms a profiled step, floor 10.00 ms: {shares}"
    assert first == "VNL first order: not profiled (RuntimeError: no profiler)"


def test_memory_is_stated_or_said_to_be_missing() -> None:
    assert memory_line(RECORDS) == "peak memory: ERM step 3.0 GiB"
    assert "not stated" in memory_line([])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.0005, "0.5 ms"), (0.0123, "12.3 ms"), (9.5, "9.5 s"), (360.0, "6.0 min")],
)
def test_times_in_their_unit(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_in_their_unit() -> None:
    assert [size(None), size(5 << 20), size(3 << 29)] == ["", "5 MiB", "1.5 GiB"]


def test_the_readme_says_command_goals_and_what_is_missing() -> None:
    text = readme(RECORDS, "vicinal bench --out here", picture=True)
    assert "vicinal bench --out here" in text
    absent = "; ".join(goals.PLAIN_EAGER[1:])
    assert f"- missed: ERM step: 1.50x plain ERM; asked: at most 1x; not held against {absent} (no" in text
    assert "- met: VNL first order: 1.50x ERM step; asked: at most 2x" in text
    assert "- not measured: VNL second order: asked: at most 2x; not run" in text
    assert "- 10,000 VNL iterations: extrapolated from 300." in text
    assert "GPU, torch 2.0, commit unknown." in text
    assert "estimate" in text
    assert "of\nthe profiled step" in text
    assert RANDOM in text
    assert SMALLER not in text
    assert "growth.png" in text
    assert "growth.png" not in readme(RECORDS, "command", picture=False)
    cells = [line.count("|") - line.count("\\|") for line in text.splitlines() if line.startswith("|")]
    assert set(cells) == {8}


def test_smaller_runs_say_so() -> None:
    assert notes([record("goals", "loop", goals.LOOP, 1.0, judged=False)]) == [SMALLER, RANDOM]


def test_a_case_that_was_not_counted_says_why() -> None:
    shy = record("goals", "training", goals.ERM, 1.0, extra={"uncounted": "RuntimeError: no rule"})
    failed = record("goals", "training", goals.FIRST, extra={"uncounted": "a"}, error="a")
    assert remarks([shy, failed]) == ["ERM step: not counted (RuntimeError: no rule)."]


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"torch": "2.0"}, "GPU, torch 2.0, commit unknown."),
        ({"torch": "2.0", "commit": "0123456789abcdef"}, "GPU, torch 2.0, commit 0123456789ab."),
        (
            {"commit": "0123", "changes": "uncommitted", "torch": "2.0"},
            "GPU, torch 2.0, commit 0123 with uncommitted changes.",
        ),
        ({"commit": "0123", "changes": "none"}, "GPU, commit 0123."),
        ({"commit": "0123", "commit_by": "VICINAL_COMMIT"}, "GPU, commit 0123 by VICINAL_COMMIT."),
        (
            {"torch": "2.0", "driver": "570.1", "cuda": "12.8", "cudnn": "91002"},
            "GPU, torch 2.0, CUDA 12.8, cuDNN 91002, driver 570.1, commit unknown.",
        ),
    ],
)
def test_what_made_the_records(told: dict[str, str], text: str) -> None:
    assert origin_lines([record("goals", "loop", goals.LOOP, 1.0, versions=told)] * 2) == [text]


def test_all_that_made_the_records_is_named() -> None:
    first, second = ({"torch": "2.0", "commit": name} for name in ("aaa", "bbb"))
    records = [
        record("goals", "training", goals.ERM, 1.0, versions=first),
        record("goals", "training", goals.FIRST, 1.0, versions=first),
        record("goals", "loop", goals.LOOP, 1.0, versions=second),
        record("growth", "size: ERM step", "7", 1.0, versions=first),
    ]
    assert origin_lines(records)[1:] == [
        "- GPU, torch 2.0, commit aaa: training, growth.",
        "- GPU, torch 2.0, commit bbb: loop.",
    ]
    assert "- GPU, torch 2.0, commit bbb: loop." in readme(records, "command", picture=False).splitlines()


def whole(*sections: str, **told: Any) -> list[BenchRecord]:
    return [record("goals", section, "a", 1.0, **told) for section in sections]


def test_the_command_that_measures_the_same_again() -> None:
    rest = [record(part, "g", "a", 1.0) for part in ("profile", "growth")]
    assert command_of([*whole(*SECTIONS), *rest], Path("here")) == "vicinal bench --device cuda --out here"
    assert command_of(whole(*SECTIONS), Path("here")) == "vicinal bench --device cuda --only goals --out here"
    some = command_of([*whole("training", "loop"), rest[1]], Path("here"))
    assert some == "vicinal bench --device cuda --only training --only loop --only growth --out here"
    cpu = {"scale": "quick", "device": "CPU, A Fast One, 2 threads"}
    sections = [section for section in SECTIONS if section != "deeper"]  # a quick run has none
    quick = command_of(whole(*sections, **cpu), Path("here"))
    assert quick == "vicinal bench --device cpu --quick --only goals --out here"


def test_everything_is_written(tmp_path: Path) -> None:
    write_bench(tmp_path, RECORDS)
    assert (tmp_path / "README.md").read_text(encoding="utf-8").startswith("# ")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_has_time_and_memory_of_every_axis() -> None:
    figure = growth_figure(RECORDS)
    assert figure is not None
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == ["classes", "domains", "parameters"] * 2
    (line,) = figure.axes[0].lines
    assert line.get_xdata().tolist() == [7, 345]
    assert line.get_ydata().tolist() == pytest.approx([30, 36])
    assert figure.axes[3].lines[0].get_ydata().tolist() == [1.0, 1.5]


def test_without_growth_there_is_no_plot() -> None:
    assert growth_figure([item for item in RECORDS if item.part != "growth"]) is None


def printed(records: list[BenchRecord], width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*bench_tables(records), sep="\n")
    return console.export_text()


def test_the_terminal_table_holds_every_row() -> None:
    text = printed(RECORDS, 240)
    assert all(what in text for what in rows())


def test_a_heading_takes_one_line_of_a_narrow_terminal() -> None:
    lines = [line.strip() for line in printed(RECORDS, 80).splitlines()]
    assert "One step on 140 images, resnet18, 224 px, 7 classes" in lines


def test_a_section_has_no_column_that_says_nothing() -> None:
    loop = [record("goals", "loop", "10,000 VNL iterations", 200.0)]
    assert "Floor" not in printed(loop, 240)
    assert "Time" in printed(loop, 240)
