"""A temperature changes how sure predictions are, and nothing else; a chosen one goes with its rule."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from vicinal.adapters.guard import Guarded
from vicinal.adapters.methods import METHODS, adapt, told
from vicinal.checkpoint import Trained
from vicinal.errors import ConfigError

MakeSource = Callable[..., Trained]
MakeImages = Callable[..., Tensor]


@pytest.mark.parametrize(
    "method", sorted(set(METHODS) - {"single_sample", "ttt", "ttt_pp"})
)  # they need nets
def test_it_divides_the_logits_alone(method: str, make_source: MakeSource, images: MakeImages) -> None:
    source = make_source({"neighbor": "neighbor", "vnl_paper": "meta"}.get(method, "erm"))
    plain, mild = (adapt(source, method, output_temperature=t) for t in (1.0, 2.5))
    for seed in range(3):
        x = images(8, seed=seed)
        torch.testing.assert_close(mild(x) * 2.5, plain(x))
    left, right = plain.state_dict(), mild.state_dict()
    torch.testing.assert_close(
        *({k: v for k, v in one.items() if v.__class__ is Tensor} for one in (left, right))
    )


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf"), "warm"])
def test_no_temperature_at_all_is_refused(temperature: Any, make_source: MakeSource) -> None:
    with pytest.raises(ConfigError, match=r"output_temperature (above 0|is a finite number)"):
        adapt(make_source(), "tent", output_temperature=temperature)


@pytest.mark.parametrize(
    ("method", "options", "kept"),
    [
        ("soft", {}, True),
        ("soft", {"statistics": "stream"}, True),
        ("soft", {"horizon": 100.0}, True),
        ("soft", {"lr": 1e-3}, False),
        ("soft", {"lr": 1e-4}, True),
        ("soft", {"predict": "own"}, True),
        ("soft", {"predict": "after"}, True),
        ("vnl", {"seed": 3}, True),
        ("vnl", {"lr": 1e-3}, False),
        ("vnl", {"update": "none"}, False),
        ("vnl", {"predict": "own"}, False),
        ("vnl", {"predict": "labels"}, True),
        ("vnl", {"predict": "own", "output_temperature": 3.0}, False),
    ],
)
def test_a_chosen_one_goes_with_the_rule_it_was_chosen_for(
    method: str, options: dict[str, Any], kept: bool, make_source: MakeSource
) -> None:
    rule = {"lr": 1e-4, "output_temperature": 1.7}
    choice = {"methods": {method: {"batch": rule, "stream": rule}}}
    found = adapt(replace(make_source(), choice=choice), method, **options).settings.output_temperature
    assert found == (1.7 if kept else options.get("output_temperature", 1.0))


@pytest.mark.parametrize("name", ["after", "own"])
@pytest.mark.parametrize("asked", ["after", "own"])
def test_after_and_own_are_one_rule(name: str, asked: str, make_source: MakeSource) -> None:
    rule = {"lr": 1e-4, "predict": name, "output_temperature": 1.7}
    source = replace(make_source(), choice={"methods": {"tent": {"batch": rule}}})
    assert adapt(source, "tent", predict=asked).settings.output_temperature == 1.7
    assert adapt(source, "tent", predict="before").settings.output_temperature == 1.0


def test_a_guard_judges_as_without_it(make_source: MakeSource, images: MakeImages) -> None:
    plain, mild = (Guarded(adapt(make_source(), "tent", lr=0.3, output_temperature=t)) for t in (1.0, 8.0))
    for seed in range(6):
        for guarded in (plain, mild):
            guarded(images(20, seed=seed))
    said = [[(event.step, event.signal, event.action) for event in one.events] for one in (plain, mild)]
    assert said[0], "nothing to compare"
    assert said[1] == said[0]


def test_a_source_that_stands_in_is_divided_too(make_source: MakeSource, images: MakeImages) -> None:
    plain, mild = (Guarded(adapt(make_source(), "tent", lr=0.3, output_temperature=t)) for t in (1.0, 8.0))
    stood_in = 0
    for seed in range(6):
        one, other = (guarded(images(20, seed=seed)) for guarded in (plain, mild))
        torch.testing.assert_close(other * 8, one)
        stood_in += mild.by_source
    assert stood_in, "nothing to compare"


def test_what_it_was_before_keeps_its_name() -> None:
    for method in METHODS:
        assert "output_temperature" not in told(METHODS[method].defaults)
    assert told(replace(METHODS["tent"].defaults, output_temperature=2.0))["output_temperature"] == 2.0
