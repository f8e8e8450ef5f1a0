"""pull: after each step, what was updated goes back toward the source."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import adapt
from vicinal.adapters.settings import Settings
from vicinal.errors import ConfigError


def by_hand(source: Adapter, batches: list[Tensor], lr: float, pull: float) -> list[Tensor]:
    """Return the logits of entropy minimisation on batch statistics, predicted after the update."""
    net = copy.deepcopy(source.model).eval()
    layers = [layer for layer in net.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    for layer in layers:
        layer.train()
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = None
    home = [value.detach().clone() for value in net.parameters()]
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    found = []
    for x in batches:
        p = F.softmax(net(x), -1)
        loss = -(p * p.log()).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for value, source_value in zip(net.parameters(), home, strict=True):
                value.copy_(value + pull * (source_value - value))
            found.append(net(x))
    return found


@pytest.mark.parametrize("pull", [0.0, 0.3])
def test_soft_with_a_pull_is_what_its_formula_says(make_source, images, pull: float) -> None:
    source = make_source()
    batches = [images(6, seed=seed) for seed in range(4)]
    adapter = adapt(source, "soft", lr=1e-2, pull=pull)
    expected = by_hand(adapt(source, "soft"), batches, 1e-2, pull)
    for x, wanted in zip(batches, expected, strict=True):
        torch.testing.assert_close(adapter(x), wanted, rtol=0, atol=1e-8)


def distance(adapter: Adapter) -> float:
    pairs = zip(adapter.model.parameters(), adapter.source.model.parameters(), strict=True)
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


def test_a_pull_bounds_how_far_a_stream_carries_a_model(make_source, images) -> None:
    lr, pull = 1e-3, 0.1
    x = images(8)
    free, held = adapt(make_source(), "soft", lr=lr), adapt(make_source(), "soft", lr=lr, pull=pull)
    for _ in range(150):
        free(x)
        held(x)
    assert distance(held) < 1.5 * lr / pull  # Adam's steps are about lr; the first ones may be longer
    assert distance(free) > 2 * distance(held)


@pytest.mark.parametrize("method", ["tent", "hard", "eata", "sar", "cotta", "delta", "tast_bn", "vnl"])
def test_every_method_that_updates_heeds_it(make_source, images, method: str) -> None:
    """A pull of nearly one leaves next to nothing of a step."""
    options = {"eata": {"margin": 0.99}, "sar": {"margin": 0.99}}.get(method, {})
    options = options | ({"update": "entropy"} if method == "vnl" else {})
    moved = []
    for pull in (0.0, 0.999):
        adapter = adapt(make_source(), method, lr=1e-2, pull=pull, **options)
        for seed in range(3):
            adapter(images(8, seed=seed))
        moved.append(distance(adapter))
    assert moved[0] > 1e-3
    assert moved[1] < 0.05 * moved[0]


@pytest.mark.parametrize("pull", [-0.1, 1.0])
def test_a_pull_is_a_share(pull: float) -> None:
    with pytest.raises(ConfigError, match="pull of at least 0 and below 1"):
        Settings(pull=pull)
