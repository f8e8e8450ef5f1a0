"""Times against a clock that the steps themselves move."""

import statistics
from collections.abc import Callable

import pytest
import torch

from vicinal.benchmarks.bench.timing import (
    MOST_REPEATS,
    interleaved,
    ratio,
    reason,
    repeats_for,
    seconds,
    spread,
    warmed,
)

CPU = torch.device("cpu")


class Clock:
    """A clock that stands still until a step takes its time."""

    def __init__(self) -> None:
        self.time = 100.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.time

    def step(self, name: str, *takes: float) -> Callable[[], None]:
        """Return a step that takes these times in turn, the last one for ever."""
        left = list(takes)

        def work() -> None:
            self.calls.append(name)
            self.time += left.pop(0) if len(left) > 1 else left[0]

        return work


def test_a_ratio_is_the_median_over_rounds_and_not_the_ratio_of_medians() -> None:
    one, other = (1.0, 10.0, 6.0), (1.0, 2.0, 6.0)
    assert statistics.median(one) / statistics.median(other) == 3.0
    assert ratio(one, other) == 1.0


def test_the_spread_is_of_the_same_ratios() -> None:
    one, other = (1.0, 10.0, 6.0), (2.0, 2.0, 6.0)
    assert spread(one, other) == (0.5, 5.0)


@pytest.mark.parametrize("compared", [ratio, spread])
def test_rounds_that_do_not_pair_are_refused(compared: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="zip"):
        compared((1.0, 2.0), (1.0,))


def test_seconds_are_a_mean_over_calls() -> None:
    clock = Clock()
    assert seconds(clock.step("a", 1.0, 2.0, 6.0), CPU, 3, clock) == pytest.approx(3.0)


def test_all_steps_run_in_every_round() -> None:
    clock = Clock()
    works = {"a": clock.step("a", 1.0), "b": clock.step("b", 0.25)}
    found = interleaved(works, {"a": 1, "b": 4}, CPU, 2, clock)
    assert clock.calls == ["a", "b", "b", "b", "b"] * 2
    assert found["a"].rounds == (1.0, 1.0)
    assert found["b"].rounds == (0.25, 0.25)
    assert found["b"].repeats == 4


def test_a_machine_that_slows_down_leaves_the_ratio_alone() -> None:
    clock = Clock()
    works = {"a": clock.step("a", 1.0, 2.0, 8.0), "b": clock.step("b", 3.0, 6.0, 24.0)}
    found = interleaved(works, {"a": 1, "b": 1}, CPU, 3, clock)
    assert ratio(found["b"].rounds, found["a"].rounds) == 3.0


def test_a_step_that_fails_says_why_and_the_others_go_on() -> None:
    clock = Clock()

    def fails() -> None:
        clock.calls.append("bad")
        raise RuntimeError("no room\nand a long story")

    found = interleaved({"bad": fails, "a": clock.step("a", 1.0)}, {"bad": 1, "a": 1}, CPU, 3, clock)
    assert found["bad"].error == "RuntimeError: no room"
    assert found["bad"].rounds == ()
    assert found["a"].rounds == (1.0, 1.0, 1.0)
    assert clock.calls.count("bad") == 1


@pytest.mark.parametrize(
    ("step", "wanted", "count"), [(1.0, 0.1, 1), (0.03, 0.1, 4), (0.1, 0.0, 1), (1e-6, 1.0, MOST_REPEATS)]
)
def test_how_many_steps_make_a_round(step: float, wanted: float, count: int) -> None:
    assert repeats_for(step, wanted) == count


def test_the_first_call_does_not_decide_how_long_a_round_is() -> None:
    clock = Clock()
    assert warmed(clock.step("a", 50.0, 0.5), CPU, 2.0, clock) == 4


def test_a_reason_is_one_short_line() -> None:
    assert reason(ValueError("")) == "ValueError"
    assert len(reason(ValueError("x" * 1000))) <= 300
