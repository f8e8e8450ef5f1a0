import io

import pytest
from rich.console import Console

from vicinal.report import bars as bars_module
from vicinal.report.bars import Bars


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=160, force_terminal=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_bar_shows_its_task_count_and_figures(console: Console) -> None:
    with Bars(console) as bars:
        bars.start("meta", 200, 50)
        bars.advance(60, {"source": 1.23456, "validation": 0.875}, 1234.4)
    last = shown(console).splitlines()[-1]
    for text in ("meta", "60/200", "source 1.235", "validation 87.5%", "1,234 images/s"):
        assert text in last


def test_the_latest_validation_stays_and_a_new_bar_forgets_it(console: Console) -> None:
    with Bars(console) as bars:
        bars.start("erm", 10)
        bars.advance(1, {"validation": 0.5})
        bars.advance(2, {"classify": 2.0})
        bars.start("phi", 10)
        bars.advance(3, {"kl": 1.0})
    lines = shown(console).splitlines()
    erm = next(line for line in reversed(lines) if "erm" in line)
    phi = next(line for line in reversed(lines) if "phi" in line)
    assert "classify 2.000" in erm
    assert "validation 50.0%" in erm
    assert "validation" not in phi


def test_a_note_names_the_bars_after_it(console: Console) -> None:
    with Bars(console) as bars:
        bars.note("left-out model without-15")
        bars.start("meta", 3)
    assert "meta, left-out model without-15" in shown(console)


def test_counting_by_name_keeps_one_bar_a_name(console: Console) -> None:
    with Bars(console) as bars:
        bars.count("meta seed 0", "train", 1, 9)
        bars.count("meta seed 1", "train", 2, 9)
        bars.count("meta seed 0", "evaluate", 3, 4)
    first, second = shown(console).splitlines()[-2:]
    assert "meta seed 0" in first
    assert "3/4" in first
    assert "evaluate" in first
    assert "meta seed 1" in second
    assert "2/9" in second


def test_into_a_file_go_lines_now_and_then(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 31.0, 31.0, 40.0, 62.0, 62.0])
    monkeypatch.setattr(bars_module.time, "monotonic", lambda: next(clock))
    with Bars(console) as bars:
        bars.start("erm", 200)
        for done in (10, 20, 30):
            bars.advance(done, {"classify": done / 10})
        said = shown(console).splitlines()
        bars.count("meta [seed 0]", "train", 1, 9)
        again = shown(console).splitlines()
    assert said == ["erm  20/200  classify 2.000"]
    assert again == [*said, "meta [seed 0]  1/9  train"]


def test_on_a_terminal_there_are_bars_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    monkeypatch.setattr(bars_module, "QUIET", -1.0)
    with Bars(console) as bars:
        bars.start("erm", 200)
        bars.advance(10, {"classify": 1.0})
    assert "erm  10/200" not in shown(console)


def test_advancing_before_a_start_is_no_error(console: Console) -> None:
    with Bars(console) as bars:
        bars.advance(1, {"loss": 1.0})
    assert "loss" not in shown(console)
