"""Sources with random weights, in double precision: references can then be compared closely."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vicinal.checkpoint import Trained
from vicinal.models.backbones import Preprocessing, build_classifier
from vicinal.models.classifier import Classifier
from vicinal.models.inference import InferenceNet, StreamInferenceNet

CLASSES = 4
MakeSource = Callable[..., Trained]
MakeImages = Callable[..., Tensor]


@pytest.fixture
def make_source() -> MakeSource:
    """Return a function that builds the same random model at every call."""
    return _source


@pytest.fixture
def images() -> MakeImages:
    """Return a function that makes seeded images of colored blocks in [0, 1]."""
    return _images


def _images(count: int, seed: int = 0, side: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(count, 3, 2, 2, generator=generator, dtype=torch.float64)
    noise = torch.rand(count, 3, side, side, generator=generator, dtype=torch.float64)
    return (blocks.repeat_interleave(side // 2, 2).repeat_interleave(side // 2, 3) + 0.3 * noise) / 1.3


def _source(algorithm: str = "erm", backbone: str = "small", side: int = 8) -> Trained:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        preprocessing = Preprocessing(side, 3, (0.5,) * 3, (0.25,) * 3)
        model = build_classifier(backbone, CLASSES, preprocessing=preprocessing).double()
        _settle(model, _images(64, seed=99, side=side))
        phi = InferenceNet(model.head.in_features, hidden=16)
        for layer in (phi.mean, phi.log_std):
            nn.init.normal_(layer.weight, std=0.05)
        nets = {"phi": phi.double(), "anchor_phi": _stream_phi(), "predict_phi": _stream_phi()}
        names = tuple(f"class {index}" for index in range(CLASSES))
        return Trained(model.eval(), backbone, names, preprocessing, algorithm, **nets)


@torch.no_grad()
def _settle(model: Classifier, x: Tensor) -> None:
    """Give BatchNorm running statistics near those of x, and a head whose predictions of x spread."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers:
        layer.momentum = 1.0
    z = model.train().embed(x)
    for layer in layers:
        layer.momentum = 0.1
        for buffer in (layer.running_mean, layer.running_var):
            buffer.mul_(1 + 0.2 * torch.rand_like(buffer))
    model.head.weight.mul_(1.5 / (z @ model.head.weight.T).std(0).mean())
    model.head.bias.copy_(-(z @ model.head.weight.T).mean(0))


@torch.no_grad()
def _stream_phi() -> StreamInferenceNet:
    phi = StreamInferenceNet(hidden=8).double()
    for value in phi.parameters():
        value.add_(0.1 * torch.randn_like(value))
    phi.location.add_(0.2 * torch.randn_like(phi.location))
    phi.scale.add_(0.5)
    phi.low.fill_(-0.3)
    phi.high.fill_(0.9)
    return phi
