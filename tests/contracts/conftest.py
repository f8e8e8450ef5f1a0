"""Every registered test-time method on nets of every kind of normalization, all weights random."""

import copy
import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import METHODS, adapt
from vicinal.checkpoint import Trained
from vicinal.functional.peers_consistency import feature_moments
from vicinal.models.auxiliary import as_extras, projection_head, rotation_head
from vicinal.models.backbones import Preprocessing, build_classifier
from vicinal.models.classifier import Classifier
from vicinal.models.inference import InferenceNet, StreamInferenceNet
from vicinal.models.single_sample import SampleInferenceNet

NETS = ("small", "small_gn", "small_ln", "small_none", "vit")
ALGORITHMS = {"neighbor": "neighbor", "vnl_paper": "meta"}
CLASSES = 4
# Methods that choose what they learn from, told to choose more: the models here are not sure of anything.
CHOOSY = {
    "pl": {"threshold": 0.3},
    "shot_im": {"threshold": 0.3, "label_weight": 0.1},
    "eata": {"margin": 0.95, "similarity": 2.0},
    "sar": {"margin": 0.95},
    "rotta": {"update_every": 3, "capacity": 8},  # streams here are shorter than its memory
    "memo": {"views": 4},
    "cotta": {"views": 3},
}


@dataclass(frozen=True)
class Case:
    """One method on one net."""

    method: str
    net: str

    def source(self) -> Trained:
        """Return a model of the net that the method can start from, the same one at every call."""
        trained = copy.deepcopy(random_source(self.net))
        trained.algorithm = ALGORITHMS.get(self.method, "erm")
        return trained

    def adapt(self, source: Trained | None = None, **options: Any) -> Adapter:
        """Return a fresh adapter; its steps are long enough to move logits by more than rounding."""
        if self.net == "small_none" and METHODS[self.method].defaults.parameters == "norm":
            options = {"parameters": "all", **options}  # it says so itself where there is no such layer
        lr = 1e-3 if self.net == "small_none" else 1e-2  # without normalization layers logits run away
        told = {"lr": lr, "num_samples": 3, **CHOOSY.get(self.method, {}), **options}
        return adapt(source or self.source(), self.method, **told)

    def images(self, count: int, seed: int = 0) -> Tensor:
        """Return seeded images in [0, 1]."""
        return random_images(self.net, count, seed)

    def stream(self, *sizes: int) -> list[Tensor]:
        """Return one batch of each size."""
        return [self.images(size, seed=10 + position) for position, size in enumerate(sizes)]

    @staticmethod
    def fingerprint(thing: Any) -> Any:
        """Return nested plain values that are equal when every tensor is equal bit for bit."""
        return fingerprint(thing)


def fingerprint(thing: Any) -> Any:
    if isinstance(thing, nn.Module):
        return fingerprint(thing.state_dict())
    if isinstance(thing, Tensor):
        flat = thing.detach().contiguous().flatten()
        # A digest: when two differ, whole tensors would drown the report.
        digest = hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()[:16]
        return f"{thing.dtype} {tuple(thing.shape)} {digest}"
    if isinstance(thing, dict):
        return {name: fingerprint(value) for name, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [fingerprint(value) for value in thing]
    return thing


def random_images(net: str, count: int, seed: int) -> Tensor:
    """Return images of colored blocks: noise alone looks the same to any average over places."""
    side, generator = 32 if net == "vit" else 8, torch.Generator().manual_seed(seed)
    blocks = torch.rand(count, 3, 2, 2, generator=generator)
    noise = torch.rand(count, 3, side, side, generator=generator)
    return (blocks.repeat_interleave(side // 2, 2).repeat_interleave(side // 2, 3) + 0.3 * noise) / 1.3


@cache
def random_source(net: str) -> Trained:
    """Return a model whose predictions spread over the classes; phis a little off their starting point."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        preprocessing = Preprocessing(32 if net == "vit" else 8, 3, (0.5,) * 3, (0.25,) * 3)
        model = _vit() if net == "vit" else build_classifier(net, CLASSES, preprocessing=preprocessing)
        _settle(model, random_images(net, 64, seed=99))
        phi = InferenceNet(model.head.in_features, hidden=16)
        for layer in (phi.mean, phi.log_std):
            nn.init.normal_(layer.weight, std=0.05)
        names = tuple(f"class {index}" for index in range(CLASSES))
        nets = {"phi": phi, "anchor_phi": _stream_phi(), "predict_phi": _stream_phi()}
        extras = as_extras("single_sample", _sample_net(model.head.in_features)) | _heads(model, net)
        return Trained(model.eval(), net, names, preprocessing, "erm", **nets, extras=extras)


def _vit() -> Classifier:
    size = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}
    features = timm.create_model("vit_tiny_patch16_224", num_classes=0, **size)
    return Classifier(features, 48, CLASSES, [0.5] * 3, [0.25] * 3)


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
def _heads(model: Classifier, net: str) -> dict[str, Tensor]:
    """Return what training leaves for `ttt` and `ttt_pp`: heads, and moments of features."""
    width = model.head.in_features
    rotation, projection = rotation_head(width), projection_head(width, 8)
    z = model.eval().embed(random_images(net, 64, seed=98))
    found = {**as_extras("ttt", rotation), **as_extras("ttt_pp.head", projection)}
    for name, value in (("features", z), ("projection", projection(z))):
        moments = {**feature_moments(value)._asdict(), "distances": value.new_tensor([1e-2, 1e-3])}
        found |= {f"ttt_pp.{name}.{what}": number for what, number in moments.items()}
    return found


@torch.no_grad()
def _stream_phi() -> StreamInferenceNet:
    phi = StreamInferenceNet(hidden=8)
    for value in phi.parameters():
        value.add_(0.1 * torch.randn_like(value))
    phi.low.fill_(-2.0)
    phi.high.fill_(2.0)
    return phi


def _sample_net(num_features: int) -> SampleInferenceNet:
    net = SampleInferenceNet(num_features, hidden=16)
    for layer in (net.mean, net.log_std):
        nn.init.normal_(layer.weight, std=0.05)
    return net


@pytest.fixture(params=[(method, net) for net in NETS for method in sorted(METHODS)], ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    """Return every method on every net."""
    return Case(*request.param)


@pytest.fixture(params=sorted(METHODS))
def batch_norm_case(request: pytest.FixtureRequest) -> Case:
    """Return every method on the net with BatchNorm, where most can go wrong."""
    return Case(request.param, "small")


@pytest.fixture
def make_case() -> type[Case]:
    """Return what makes one method on one net."""
    return Case
