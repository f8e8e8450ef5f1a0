import io
from typing import Any

import pytest
import torch
from rich.console import Console

from vicinal.checkpoint import Trained
from vicinal.models.backbones import Preprocessing, build_classifier
from vicinal.report.choices import choice_summary

ROW: dict[str, Any] = {
    "method": "vnl", "update": "anchored", "lr": 1e-3, "statistics": "stream",
    "predict": "labels", "accuracy": 0.8125, "nll": 0.61234, "worst": 0.7, "chosen": True,
}  # fmt: skip


def text(trained: Trained, styled: bool = False) -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=styled, color_system="standard")
    console.print(choice_summary(trained))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def trained(**changes: Any) -> Trained:
    preprocessing = Preprocessing(8, 1, (0.5,), (0.5,))
    with torch.random.fork_rng(devices=[]):
        model = build_classifier("small", 2, preprocessing=preprocessing)
    return Trained(model, "small", ("a", "b"), preprocessing, "meta", **changes)


def test_without_a_choice_there_is_one_line() -> None:
    (line,) = text(trained(provenance={"validation_accuracy": 0.915})).splitlines()
    assert line.strip() == "small, meta: source validation accuracy 91.5%"


def test_an_unknown_accuracy_is_said_to_be_unknown() -> None:
    assert "accuracy unknown" in text(trained())
    assert "accuracy unknown" in text(trained(provenance={"validation_accuracy": None}))


def test_every_candidate_is_a_line() -> None:
    still = ROW | {"update": "none", "lr": 1e-4, "accuracy": 0.5, "worst": 0.25, "chosen": False}
    lines = text(trained(choice={"table": [ROW, still]})).splitlines()
    first = next(line for line in lines if "anchored" in line)
    for cell in ("vnl", "1e-03", "at once", "stream", "labels", "81.2%", "70.0%", "0.612"):
        assert cell in first
    second = next(line for line in lines if "none" in line)
    assert "1e-04" not in second
    assert "at once" not in second
    rested = text(trained(choice={"table": [ROW | {"from_rest": True}]}))
    assert "from rest" in next(line for line in rested.splitlines() if "anchored" in line)
    assert "25.0%" in second


def test_only_the_chosen_line_is_bold() -> None:
    other = ROW | {"update": "entropy", "chosen": False}
    lines = text(trained(choice={"table": [ROW, other]}), styled=True).splitlines()
    bold = "\x1b[1m"
    assert bold in next(line for line in lines if "anchored" in line)
    assert bold not in next(line for line in lines if "entropy" in line)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"update": "marginal", "doubt": 0.1234}, True),
        ({"update": "marginal", "doubt": None}, False),
        ({"update": "none", "doubt": 0.1234}, False),
        ({"update": "marginal"}, False),
    ],
)
def test_it_says_what_doubt_steps_are_held_against(rule: dict[str, Any], told: bool) -> None:
    shown = text(trained(choice={"table": [ROW], "methods": {"vnl": {"stream": rule}}}))
    assert ("doubts less than 0.123" in shown) == told
