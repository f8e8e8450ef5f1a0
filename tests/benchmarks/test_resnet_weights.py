"""Keras' ResNet-50 under torchvision's names gives what Keras' own arithmetic gives."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet50

KERAS_EPS = 1e-3


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "resnet_weights.py"
    found = importlib.util.spec_from_file_location("resnet_weights", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def keras_tensors() -> dict[str, Tensor]:
    """Return random tensors under Keras' names, a layer for each of a ResNet-50's."""
    draw = torch.Generator().manual_seed(0)
    blocks = {2: "abc", 3: "abcd", 4: "abcdef", 5: "abc"}
    convs = {"conv1": (7, 7, 3, 64)}
    for stage, letters in blocks.items():
        width = 64 * 2 ** (stage - 2)
        fed = 64 if stage == 2 else 2 * width
        for letter in letters:
            first = letter == "a"
            name = f"res{stage}{letter}_branch"
            convs[f"{name}2a"] = (1, 1, fed if first else 4 * width, width)
            convs[f"{name}2b"] = (3, 3, width, width)
            convs[f"{name}2c"] = (1, 1, width, 4 * width)
            if first:
                convs[f"{name}1"] = (1, 1, fed, 4 * width)
    found: dict[str, Tensor] = {}
    for conv, shape in convs.items():
        norm = "bn_conv1" if conv == "conv1" else conv.replace("res", "bn")
        found[f"{conv}/kernel"] = 0.02 * torch.randn(shape, generator=draw)
        found[f"{conv}/bias"] = torch.randn(shape[-1], generator=draw)
        for name in ("gamma", "beta", "moving_mean"):
            found[f"{norm}/{name}"] = torch.randn(shape[-1], generator=draw)
        found[f"{norm}/moving_variance"] = torch.rand(shape[-1], generator=draw)
    found["fc1000/kernel"] = torch.randn(2048, 1000, generator=draw)
    return found | {"fc1000/bias": torch.randn(1000, generator=draw)}


def keras_layer(x: Tensor, tensors: dict[str, Tensor], conv: str, norm: str, **how: int) -> Tensor:
    """Return a convolution with bias and its normalization, written out, in double precision."""
    t = {name: tensor.double() for name, tensor in tensors.items() if name.startswith((conv, norm))}
    y = nn.functional.conv2d(x, t[f"{conv}/kernel"].permute(3, 2, 0, 1), t[f"{conv}/bias"], **how)
    mean, var, gamma, beta = (
        t[f"{norm}/{name}"][:, None, None] for name in ("moving_mean", "moving_variance", "gamma", "beta")
    )
    return gamma * (y - mean) / (var + KERAS_EPS).sqrt() + beta


@pytest.fixture(scope="module")
def net(script: ModuleType) -> nn.Module:
    tensors = keras_tensors()
    epsilons = {name.split("/")[0]: KERAS_EPS for name in tensors if name.endswith("/gamma")}
    made = resnet50(weights=None)
    missing, unexpected = made.load_state_dict(script.translated(tensors, epsilons), strict=False)
    assert unexpected == []
    assert all(name.endswith("num_batches_tracked") for name in missing)
    return made.double().eval()


def test_every_layer_of_a_block_gives_what_keras_gives(net: nn.Module) -> None:
    tensors, block = keras_tensors(), net.get_submodule("layer3.4")  # Keras' res4e
    x = torch.randn(2, 1024, 5, 5, dtype=torch.float64)
    for number, letter in enumerate("abc", 1):
        padding = 1 if letter == "b" else 0
        names = f"res4e_branch2{letter}", f"bn4e_branch2{letter}"
        expected = keras_layer(x, tensors, *names, padding=padding)
        conv, norm = block.get_submodule(f"conv{number}"), block.get_submodule(f"bn{number}")
        torch.testing.assert_close(norm(conv(x)), expected, rtol=1e-5, atol=1e-5)
        x = expected


def test_shortcuts_are_the_downsampling(net: nn.Module) -> None:
    x = torch.randn(2, 512, 4, 4, dtype=torch.float64)
    down = net.get_submodule("layer3.0.downsample.0"), net.get_submodule("layer3.0.downsample.1")
    expected = keras_layer(x, keras_tensors(), "res4a_branch1", "bn4a_branch1", stride=2)
    torch.testing.assert_close(down[1](down[0](x)), expected, rtol=1e-5, atol=1e-5)


def test_images_come_as_torchvision_feeds_them(net: nn.Module) -> None:
    image = torch.rand(1, 3, 24, 24, dtype=torch.float64)  # RGB, 0 to 1
    bgr = 255 * image.flip(1) - torch.tensor([103.939, 116.779, 123.68])[None, :, None, None]
    usual = (image - torch.tensor([0.485, 0.456, 0.406])[None, :, None, None]) / torch.tensor(
        [0.229, 0.224, 0.225]
    )[None, :, None, None]
    expected = keras_layer(bgr, keras_tensors(), "conv1", "bn_conv1", stride=2, padding=3)
    conv, norm = net.get_submodule("conv1"), net.get_submodule("bn1")
    inner = (..., slice(2, -2), slice(2, -2))  # where no padding is seen: it is black here, grey there
    torch.testing.assert_close(norm(conv(usual))[inner], expected[inner], rtol=1e-4, atol=1e-4)


def test_the_classifier_is_turned_around(net: nn.Module) -> None:
    tensors, z = keras_tensors(), torch.randn(2, 2048, dtype=torch.float64)
    expected = z @ tensors["fc1000/kernel"].double() + tensors["fc1000/bias"].double()
    torch.testing.assert_close(net.get_submodule("fc")(z), expected)
