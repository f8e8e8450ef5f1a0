"""from_rest: Adam's momentum starts from nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from vicinal.adapters import passes
from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import adapt
from vicinal.errors import ConfigError

LR = 1e-2


class SlowAdam:
    """Adam by hand, the second moment corrected and the first one not."""

    def __init__(self, values: list[Tensor]) -> None:
        self.values = [value.detach().clone() for value in values]
        self.m, self.v, self.t = ([torch.zeros_like(value) for value in values] for _ in range(3))

    def step(self, gradients: list[Tensor]) -> None:
        for value, m, v, t, g in zip(self.values, self.m, self.v, self.t, gradients, strict=True):
            t += 1
            m.copy_(0.9 * m + 0.1 * g)
            v.copy_(0.999 * v + 0.001 * g**2)
            value -= LR * m / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


def parameters(adapter: Adapter) -> list[Tensor]:
    return [value.detach().clone() for value in adapter.model.parameters()]


def moved(adapter: Adapter) -> float:
    pairs = zip(adapter.model.parameters(), adapter.source.model.parameters(), strict=True)
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_adam_without_the_correction_of_its_momentum(
    make_source: Any, images: Any, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "adam_options", lambda device: {"fused": True} if fused else {})
    adapter = adapt(make_source(), "soft", lr=LR, from_rest=True)
    slow = SlowAdam(parameters(adapter))
    for seed, count in enumerate((6, 3, 8, 5)):
        adapter(images(count, seed))
        slow.step([value.grad for value in adapter.model.parameters()])
        for ours, theirs in zip(parameters(adapter), slow.values, strict=True):
            # Fused steps read their size in single precision.
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7 if fused else 1e-12)


def test_the_first_step_is_a_tenth_of_adams(make_source: Any, images: Any) -> None:
    adapter = adapt(make_source(), "soft", lr=LR, from_rest=True)
    adapter(images(6))
    assert moved(adapter) == pytest.approx(LR / 10, rel=1e-3)


def test_with_a_horizon_a_step_has_the_share_of_both(make_source: Any, images: Any) -> None:
    adapter, plain = (
        adapt(make_source(), "soft", lr=LR, **told) for told in ({"from_rest": True, "horizon": 10.0}, {})
    )
    seen = 0
    for batch, count in enumerate((6, 3, 8)):
        assert plain.optimizer is not None
        plain.optimizer.param_groups[0]["lr"] = LR * (1 - 0.9 ** (batch + 1)) * 10 / (10 + seen)
        torch.testing.assert_close(adapter(images(count, batch)), plain(images(count, batch)))
        seen += count


def test_steps_count_not_batches_and_a_reset_is_rest_again(make_source: Any, images: Any) -> None:
    twice = adapt(make_source(), "soft", lr=LR, from_rest=True, steps=2)
    first = twice(images(6))
    assert moved(twice) > 1.5 * LR / 10
    twice(images(6, 1))
    twice.reset()
    assert torch.equal(twice(images(6)), first)


def test_a_saved_state_goes_on_with_the_same_momentum(make_source: Any, images: Any) -> None:
    one, other = (adapt(make_source(), "soft", lr=LR, from_rest=True) for _ in range(2))
    one(images(6))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert torch.equal(one(images(6, 1)), other(images(6, 1)))


@pytest.mark.parametrize("told", [{}, {"horizon": 9.0}])
def test_sgd_has_nothing_to_correct(make_source: Any, images: Any, told: dict[str, Any]) -> None:
    one, other = (
        adapt(make_source(), "soft", lr=LR, optimizer="sgd", from_rest=rest, **told) for rest in (True, False)
    )
    for seed in range(3):
        assert torch.equal(one(images(6, seed)), other(images(6, seed)))


@pytest.mark.parametrize("told", ["false", 1, None])
def test_it_is_true_or_false(make_source: Any, told: Any) -> None:
    with pytest.raises(ConfigError, match="from_rest is true or false"):
        adapt(make_source(), "soft", from_rest=told)
