"""The small net: its layers, its sizes and what each kind of normalization means."""

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, layer_norm, max_pool2d, relu

from vicinal.models.small import WIDTHS, Norm, small_features

NORMS: list[Norm] = ["batch", "group", "layer", "none"]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [4, 8, 17, 32])
def test_emits_vectors_of_the_stated_width_at_every_size(norm: Norm, channels: int, size: int) -> None:
    net, width = small_features(channels, norm)
    z = net(torch.rand(3, channels, size, size))
    assert z.shape == (3, width)
    assert z.isfinite().all()


@pytest.mark.parametrize("norm", NORMS)
def test_weights_are_counted_by_hand(norm: Norm) -> None:
    net, _ = small_features(1, norm)
    first, second, third = WIDTHS
    convolutions = 9 * (1 * first + first * second + second * third)
    channels = first + second + third
    beside = channels if norm == "none" else 2 * channels  # a bias, or the scale and shift that stand for it
    assert sum(value.numel() for value in net.parameters()) == convolutions + beside


def kinds(norm: Norm) -> set[str]:
    net, _ = small_features(1, norm)
    return {type(part).__name__ for part in net.modules() if "Norm" in type(part).__name__}


def test_only_the_asked_kind_of_normalization_is_inside() -> None:
    assert {norm: kinds(norm) for norm in NORMS} == {
        "batch": {"BatchNorm2d"},
        "group": {"GroupNorm"},
        "layer": {"GroupNorm"},
        "none": set(),
    }


def test_layer_norm_normalizes_over_channels_and_space() -> None:
    net, _ = small_features(1, "layer")
    maps = torch.rand(2, WIDTHS[0], 5, 5)
    norm = next(part for part in net.modules() if isinstance(part, nn.GroupNorm))
    torch.testing.assert_close(norm(maps), layer_norm(maps, maps.shape[1:]))


@pytest.mark.parametrize("norm", NORMS)
def test_only_batch_norm_lets_samples_see_each_other(norm: Norm) -> None:
    net, _ = small_features(1, norm)
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together, alone = net.train()(x)[:2], net(x[:2])
    assert torch.allclose(together, alone, atol=1e-5) == (norm != "batch")


def test_agrees_with_the_same_net_written_out() -> None:
    net, _ = small_features(3, "none")
    x = torch.rand(2, 3, 16, 16)
    convs = [part for part in net.modules() if isinstance(part, nn.Conv2d)]
    y = max_pool2d(relu(conv2d(x, convs[0].weight, convs[0].bias, padding=1)), 2)
    y = max_pool2d(relu(conv2d(y, convs[1].weight, convs[1].bias, padding=1)), 2)
    y = relu(conv2d(y, convs[2].weight, convs[2].bias, padding=1))
    torch.testing.assert_close(net(x), y.mean((2, 3)))


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_reach_every_weight(norm: Norm) -> None:
    net, _ = small_features(1, norm)
    net(torch.rand(4, 1, 8, 8)).square().sum().backward()
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in net.parameters())
