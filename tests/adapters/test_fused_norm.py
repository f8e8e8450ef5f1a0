"""Steps with BatchNorm layers in two kernels against the same steps as written, on the CPU and a GPU."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from vicinal import graphs
from vicinal.adapters import fused_norm, norm_kernels
from vicinal.adapters.methods import adapt
from vicinal.adapters.norm_kernels import NAMES
from vicinal.checkpoint import Trained
from vicinal.models.classifier import Classifier

SMALL_BLOCKS, LARGE_BLOCKS = (8, 4, 5), (64, 32, 64)  # threads, channels, least rows
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("built", [SMALL_BLOCKS], indirect=True, ids=str)
@pytest.mark.parametrize("kind", ["stream", "blend"])
def test_a_forward_of_somebodys_own_on_a_layer_is_not_passed_over(
    started: list[str], make_source: Any, images: Any, kind: str
) -> None:
    outputs, called = [], []

    def own(layer: nn.Module, x: Tensor) -> Tensor:
        called.append(layer)
        return nn.BatchNorm2d.forward(layer, x)

    for patch in (False, True):
        trained = single(make_source())
        trained.model.features.to(memory_format=torch.channels_last)
        (layer, *_) = [m for m in trained.model.modules() if isinstance(m, nn.BatchNorm2d)]
        if patch:
            layer.forward = partial(own, layer)
        adapter = adapt(trained, "soft", statistics=kind, inplace=True)
        outputs.append(adapter(images(6).float()))
        assert bool(called) == patch
    torch.testing.assert_close(*outputs)


def single(trained: Trained, model: Classifier | None = None) -> Trained:
    """Return a source in single precision whose images lie as a GPU's do."""
    moved = {
        field.name: getattr(trained, field.name).float()
        for field in dataclasses.fields(trained)
        if isinstance(getattr(trained, field.name), nn.Module)
    }
    moved["model"] = (model or moved["model"]).float().to(memory_format=torch.channels_last)
    return dataclasses.replace(trained, **moved)


def residual(device: str = "cpu") -> Classifier:
    """A net with shortcuts, and activations that overwrite what the layers put out."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        features = timm.create_model("resnet10t", num_classes=0, zero_init_last=False)
        for layer in features.modules():
            if isinstance(layer, nn.BatchNorm2d):  # else nothing would be cut off before a sum
                nn.init.normal_(layer.weight, 1, 0.3), nn.init.normal_(layer.bias, 0, 0.3)
        return Classifier(features, 512, 4, [0.5] * 3, [0.25] * 3).eval().to(device)


class Twice(nn.Module):
    """Features that use a layer twice."""

    def __init__(self, features: nn.Sequential) -> None:
        super().__init__()
        self.features, self.again = features, nn.Conv2d(24, 24, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first, norm = self.features[:2]
        return self.features[2:](norm(self.again(norm(first(x)).relu())))


def told_by(
    trained: Trained, batches: list[Tensor], method: str, recordings: int = 0, **told: Any
) -> list[Tensor]:
    """Return what an adapter predicts, and then is."""
    adapter = adapt(trained, method, optimizer="sgd", lr=1e-2, **told)
    found = [adapter(batch) for batch in batches]
    assert (adapter.recorder.recordings, adapter.recorder.refused) == (recordings, "")
    return [*found, *(value for value in adapter.state_dict().values() if isinstance(value, Tensor))]


@pytest.mark.parametrize("told", [{}, {"parameters": "norm"}, {"parameters": "head"}, {"steps": 2}], ids=str)
@pytest.mark.parametrize("kind", ["stream", "blend", "batch"])
@pytest.mark.parametrize("method", ["soft", "tent", "vnl"])
@pytest.mark.parametrize("built", [SMALL_BLOCKS], indirect=True, ids=str)
def test_steps_are_those_of_the_layers_as_written(
    started: list[str],
    make_source: Any,
    images: Any,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    kind: str,
    told: dict[str, Any],
) -> None:
    """Also with a layer that is used twice, and batches of one."""
    trained = single(make_source())
    torch.manual_seed(0)
    trained.model.features = Twice(trained.model.features).to(memory_format=torch.channels_last)
    batches = [images(count, seed).float() for seed, count in enumerate((6, 1, 5))]
    fused = told_by(trained, batches, method, statistics=kind, **told)
    assert started, "a batch of one runs on an average whatever the statistics are"
    monkeypatch.setattr(fused_norm, "_kernels_for", lambda *_: None)
    count = len(started)
    as_written = told_by(trained, batches, method, statistics=kind, **told)
    assert len(started) == count
    for one, other in zip(fused, as_written, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("built", [LARGE_BLOCKS], indirect=True, ids=str)
def test_activations_that_overwrite_are_done_along_with_their_layer(
    started: list[str], make_source: Any, images: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, batches = (
        single(make_source(), residual()),
        [images(4, seed, side=32).float() for seed in range(2)],
    )
    layers = sum(type(layer) is nn.BatchNorm2d for layer in trained.model.modules())
    rectified: list[bool] = []
    forward = norm_kernels.forward

    def noted(kernels: Any, x: Tensor, given: norm_kernels.Given) -> norm_kernels.Done:
        rectified.append(given.rectify)
        return forward(kernels, x, given)

    monkeypatch.setattr(norm_kernels, "forward", noted)
    fused = told_by(trained, batches, "soft", statistics="stream")
    assert len(started) == 6 * layers * len(batches)
    # Three ReLUs follow the layers of the stem, one the first layer of each block; the others a sum.
    assert [sum(rectified[i : i + layers]) for i in range(0, 4 * layers, layers)] == [0, 7, 7, 7]
    monkeypatch.setattr(fused_norm, "_kernels_for", lambda *_: None)
    for one, other in zip(fused, told_by(trained, batches, "soft", statistics="stream"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@gpu
@pytest.mark.parametrize("warm_up", [1, 10**6], ids=["recorded", "eager"])
@pytest.mark.parametrize("told", [{}, {"parameters": "norm"}], ids=str)
@pytest.mark.parametrize("method", ["soft", "tent", "vnl"])
@pytest.mark.parametrize("net", ["small", "residual"])
def test_steps_on_a_gpu(
    make_source: Any,
    images: Any,
    monkeypatch: pytest.MonkeyPatch,
    net: str,
    method: str,
    told: dict[str, Any],
    warm_up: int,
) -> None:
    """Fused, eager or recorded, against eager and as written; for vnl with the anchor's branch."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    trained = single(make_source(), residual() if net == "residual" else None)
    for field in dataclasses.fields(trained):
        if isinstance(getattr(trained, field.name), nn.Module):
            getattr(trained, field.name).cuda()
    side = 32 if net == "residual" else 8
    batches = [images(6 if seed < 5 else 4, seed, side=side).float().cuda() for seed in range(7)]
    told = {**told, "statistics": "stream"}
    starts: list[str] = []
    kernels = norm_kernels.kernels_of(torch.cuda.current_device())
    assert kernels is not None
    counted = {name: partial(_counted, starts, name, kernel) for name, kernel in kernels.items()}
    monkeypatch.setattr(norm_kernels, "kernels_of", lambda device: counted)
    monkeypatch.setattr(graphs, "WARM_UP", warm_up)
    fused = told_by(trained, batches, method, recordings=2 if warm_up == 1 else 0, **told)
    assert set(starts) == set(NAMES)
    monkeypatch.setattr(fused_norm, "_kernels_for", lambda *_: None)
    monkeypatch.setattr(graphs, "WARM_UP", 10**6)
    for one, other in zip(fused, told_by(trained, batches, method, **told), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def _counted(starts: list[str], name: str, kernel: Any, *told: Any) -> None:
    starts.append(name)
    kernel(*told)
