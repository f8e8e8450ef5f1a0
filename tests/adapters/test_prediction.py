"""adapter.predict against the same numbers made by hand from draws of w."""

import math
from typing import Any

import pytest
import torch

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.methods import adapt
from vicinal.errors import AdapterError
from vicinal.functional.inference import prior
from vicinal.functional.labels import hard_labels, neighbor_draws, neighbor_labels
from vicinal.types import GaussianW


def by_hand(p: torch.Tensor) -> list[tuple[int, float, float]]:
    return [
        (row.index(max(row)), max(row), -sum(v * math.log(v) for v in row if v > 0)) for row in p.tolist()
    ]


@pytest.mark.parametrize("method", ["erm", "soft", "vnl", "labels"])
def test_label_probability_and_entropy_are_those_of_the_logits(
    make_source: Any, images: Any, method: str
) -> None:
    adapter, twin = (adapt(make_source(), method) for _ in range(2))
    found, p = adapter.predict(images(6)), twin(images(6)).float().softmax(-1)
    for (label, probability, entropy), k, chance, h in zip(
        by_hand(p), found.label, found.probability, found.entropy, strict=True
    ):
        assert int(k) == label
        assert float(chance) == pytest.approx(probability, abs=1e-6)
        assert float(h) == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize("method", ["neighbor", "vnl_paper"])
def test_the_spread_is_the_deviation_over_draws_of_w(make_source: Any, images: Any, method: str) -> None:
    source = make_source("neighbor" if method == "neighbor" else "meta")
    found = adapt(source, method, statistics="source", predict="labels", num_samples=5).predict(images(6))
    z, logits = source.model.features_and_logits(images(6))
    w = prior(source.phi, z, hard_labels(logits), source.model.linear)
    draws = neighbor_draws(z, w, 5, torch.Generator().manual_seed(0)).detach()
    assert found.spread is not None
    for image, label in enumerate(found.label.tolist()):
        told = [float(draws[draw, image, label]) for draw in range(5)]
        mean = sum(told) / 5
        assert float(found.spread[image]) == pytest.approx(
            math.sqrt(sum((p - mean) ** 2 for p in told) / 5), abs=1e-6
        )
        assert float(found.probability[image]) == pytest.approx(mean, abs=1e-6)


def test_the_draws_of_the_default_method_average_to_its_prediction(make_source: Any, images: Any) -> None:
    for method in ("vnl", "labels"):
        adapter = adapt(make_source(), method, num_samples=4)
        p = adapter(images(6)).softmax(-1)
        assert adapter.draws is not None
        assert adapter.draws.shape == (4, 6, 4)
        torch.testing.assert_close(adapter.draws.mean(0), p)


def test_draws_are_what_labels_average() -> None:
    generator = torch.Generator().manual_seed(1)
    w = GaussianW(
        torch.randn(3, 5, generator=generator), torch.rand(3, 5, generator=generator), torch.ones(3)
    )
    z = torch.randn(4, 5, generator=generator)
    draws = neighbor_draws(z, w, 7, torch.Generator().manual_seed(2))
    assert draws.shape == (7, 4, 3)
    assert torch.equal(draws.mean(0), neighbor_labels(z, w, 7, torch.Generator().manual_seed(2)))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("erm", {}),
        ("soft", {}),
        ("probabilistic", {}),
        ("labels", {"num_samples": 0}),
        ("vnl", {"update": "entropy", "predict": "own"}),
    ],
)
def test_without_draws_of_w_there_is_no_spread(
    make_source: Any, images: Any, method: str, options: dict[str, Any]
) -> None:
    assert adapt(make_source(), method, **options).predict(images(6)).spread is None


def test_draws_of_an_earlier_batch_are_not_taken_for_this_one(make_source: Any, images: Any) -> None:
    adapter = adapt(make_source(), "labels")
    adapter(images(6))
    with pytest.raises(AdapterError):
        adapter(images(6) / 0)
    assert adapter.predict(images(3)).spread.shape == (3,)
