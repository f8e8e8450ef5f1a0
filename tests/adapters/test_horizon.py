"""horizon: steps become shorter along the stream."""

import copy
from typing import Any

import pytest
import torch

from vicinal.adapters import passes
from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import adapt
from vicinal.adapters.settings import Settings
from vicinal.errors import ConfigError


def distance(adapter: Adapter) -> float:
    pairs = zip(adapter.model.parameters(), adapter.source.model.parameters(), strict=True)
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


@pytest.mark.parametrize("optimizer", ["adam", "fused adam", "sgd"])
@pytest.mark.parametrize("pull", [0.0, 0.1])
def test_it_is_a_step_size_that_shrinks(
    make_source: Any, images: Any, optimizer: str, pull: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lr, horizon, sizes = 1e-2, 10.0, (6, 3, 8, 5)
    close = 1e-9
    if optimizer == "fused adam":  # as on a GPU, where it reads step sizes in single precision
        optimizer, close = "adam", 1e-6
        monkeypatch.setattr(passes, "adam_options", lambda device: {"fused": True})
    adapter = adapt(make_source(), "soft", lr=lr, horizon=horizon, optimizer=optimizer, pull=pull)
    plain = adapt(make_source(), "soft", lr=lr, optimizer=optimizer, pull=pull)
    seen = 0
    for seed, count in enumerate(sizes):
        assert plain.optimizer is not None
        plain.optimizer.param_groups[0]["lr"] = lr / (1 + seen / horizon)
        torch.testing.assert_close(
            adapter(images(count, seed)), plain(images(count, seed)), rtol=0, atol=close
        )
        seen += count
    assert float(adapter.seen) == seen
    assert adapter.optimizer is not None
    assert adapter.optimizer.param_groups[0]["lr"] == lr
    free = adapt(make_source(), "soft", lr=lr, optimizer=optimizer, pull=pull)
    for seed, count in enumerate(sizes):
        free(images(count, seed))
    assert distance(free) > 1.1 * distance(adapter)


@pytest.mark.parametrize("method", ["tent", "hard", "eata", "sar", "cotta", "delta", "tast_bn", "vnl"])
def test_every_method_that_updates_heeds_it(make_source: Any, images: Any, method: str) -> None:
    """After the first batch a horizon of next to nothing leaves next to nothing of a step."""
    margin = {"margin": 0.99}
    told = {"cotta": {"restore": 0.0}, "vnl": {"update": "entropy"}, "eata": margin, "sar": margin}
    options = told.get(method, {})
    adapter = adapt(make_source(), method, lr=1e-2, horizon=1e-6, **options)
    adapter(images(8))
    first = copy.deepcopy(adapter.model.state_dict())
    for seed in range(1, 3):
        adapter(images(8, seed))
    names = dict(adapter.model.named_parameters())
    moved = max(float((adapter.model.state_dict()[name] - first[name]).abs().max()) for name in names)
    assert distance(adapter) > 1e-3
    assert moved < 1e-5


def test_a_step_that_fails_leaves_the_step_size_as_it_was(
    make_source: Any, images: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "adam_options", lambda device: {"fused": True})
    adapter = adapt(make_source(), "soft", lr=1e-2, horizon=5.0)
    assert adapter.optimizer is not None

    def fails() -> None:
        raise RuntimeError

    monkeypatch.setattr(adapter.optimizer, "step", fails)
    with pytest.raises(RuntimeError):
        adapter(images(6))
    assert adapter.optimizer.param_groups[0]["lr"] == 1e-2


def test_a_reset_forgets_how_much_was_seen(make_source: Any, images: Any) -> None:
    adapter = adapt(make_source(), "soft", lr=1e-2, horizon=5.0)
    first = adapter(images(6))
    adapter(images(6, 1))
    adapter.reset()
    assert float(adapter.seen) == 0
    assert torch.equal(adapter(images(6)), first)


@pytest.mark.parametrize("horizon", [0.0, -1.0, float("nan"), float("inf")])
def test_it_is_a_number_of_images(horizon: float) -> None:
    with pytest.raises(ConfigError, match="horizon"):
        Settings(horizon=horizon)
