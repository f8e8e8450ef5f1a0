"""LAME against its paper written out again: loops over images, a plain fixed-point iteration."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal.adapters.lame  # noqa: F401  files the method
from vicinal.adapters.methods import adapt
from vicinal.errors import AdapterError, ConfigError
from vicinal.functional.peers_prototypes import smoothed_assignments

CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def slow_affinity(z: Tensor, kind: str, k: int) -> Tensor:
    n = len(z)
    unit = [row / row.norm() for row in z]
    distance = [[float((a - b).norm()) for b in unit] for a in unit]
    w = torch.zeros(n, n, dtype=z.dtype)
    sigma = sum(sorted(row)[min(k, n) - 1] for row in distance) / n
    for i in range(n):
        others = sorted((j for j in range(n) if j != i), key=lambda j, i=i: distance[i][j])
        for j in range(n):
            if kind == "knn":
                w[i, j] = float(j in others[:k])
            elif kind == "rbf":
                w[i, j] = torch.exp(torch.tensor(-(distance[i][j] ** 2) / (2 * sigma**2)))
            else:
                w[i, j] = unit[i] @ unit[j]
    return w


def slow_assignments(
    p: Tensor, w: Tensor, iterations: int = 100, tolerance: float = 1e-8
) -> tuple[Tensor, int]:
    """Return y and how many iterations it took."""
    y, old = p.clone(), float("inf")
    for iteration in range(iterations):
        pull = torch.stack([sum(w[i, j] * y[j] for j in range(len(p))) for i in range(len(p))])
        y = torch.stack([p[i] * pull[i].exp() / (p[i] * pull[i].exp()).sum() for i in range(len(p))])
        energy = float((-p.log() * y - pull * y + y * y.log()).sum())
        if iteration > 1 and abs(energy - old) <= tolerance * abs(old):
            return y, iteration + 1
        old = energy
    return y, iterations


@torch.no_grad()
def told(model: Any, x: Tensor, on_batch: bool) -> tuple[Tensor, Tensor]:
    z, logits = model.train(on_batch).features_and_logits(x)
    return z, logits.softmax(1)


@pytest.mark.parametrize("kind", ["source", "batch"])
@pytest.mark.parametrize(("affinity", "neighbors"), [("knn", 5), ("knn", 1), ("rbf", 3), ("linear", 5)])
def test_a_stream_agrees_with_the_slow_reference(
    make_source: Any, images: Any, affinity: str, neighbors: int, kind: str
) -> None:
    adapter = adapt(make_source(), "lame", affinity=affinity, neighbors=neighbors, statistics=kind)
    for seed, count in enumerate((9, 4, 7)):
        x = images(count, seed)
        z, p = told(make_source().model, x, kind == "batch")
        y, taken = slow_assignments(p, slow_affinity(z, affinity, neighbors))
        assert taken < 100
        torch.testing.assert_close(adapter(x).exp(), y, **CLOSE)
        assert (y - p).abs().max() > 0.01


def test_the_defaults_are_those_of_the_paper(make_source: Any, images: Any) -> None:
    adapter, x = adapt(make_source(), "lame"), images(9)
    z, p = told(make_source().model, x, False)
    torch.testing.assert_close(adapter(x).exp(), slow_assignments(p, slow_affinity(z, "knn", 5))[0], **CLOSE)
    assert (adapter.settings.iterations, adapter.settings.tolerance) == (100, 1e-8)


@pytest.mark.parametrize(
    ("iterations", "tolerance"), [(1, 0.0), (4, 0.0), (7, 0.0), (100, 1e-2), (100, 1e-4), (100, 1.0)]
)
def test_it_stops_where_it_is_told_to(images: Any, iterations: int, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(3)
    p = torch.randn(8, 4, generator=generator, dtype=torch.float64).softmax(1)
    w = 0.3 * torch.rand(8, 8, generator=generator, dtype=torch.float64)
    expected, taken = slow_assignments(p, w, iterations, tolerance)
    found = smoothed_assignments(p.log(), w, iterations, tolerance).exp()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    further = slow_assignments(p, w, taken + 1, 0.0)[0]
    assert (further - expected).abs().max() > 1e-8  # so that one iteration more would be seen


def test_an_image_alone_keeps_its_own_prediction(make_source: Any, images: Any) -> None:
    for affinity in ("knn", "rbf", "linear"):
        adapter, x = adapt(make_source(), "lame", affinity=affinity), images(1)
        torch.testing.assert_close(adapter(x).exp(), make_source().model(x).softmax(1).detach(), **CLOSE)


def test_no_parameter_moves(make_source: Any, images: Any) -> None:
    source = make_source()
    adapter = adapt(source, "lame")
    adapter(images(6))
    for found, wanted in zip(adapter.model.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_a_model_without_features_is_told_what_to_name() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten())
    with pytest.raises(AdapterError, match="features="):
        adapt(net, "lame")
    logits = adapt(net, "lame", features="1")(torch.rand(5, 3, 8, 8))
    assert logits.shape == (5, 4)


@pytest.mark.parametrize(
    "wrong", [{"affinity": "cosine"}, {"neighbors": 0}, {"iterations": 0}, {"tolerance": -1.0}]
)
def test_settings_out_of_range_are_refused(make_source: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        adapt(make_source(), "lame", **wrong)
