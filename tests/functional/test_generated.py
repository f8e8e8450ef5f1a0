"""Logits and divergence of generated classifiers against draws of whole classifiers and torch's own KL."""

import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from vicinal.functional.generated import generated_kl, generated_logits
from vicinal.types import GaussianW


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classifier(*shape: int, seed: int) -> GaussianW:
    bias = random(shape[-2], seed=seed + 2).expand(shape[:-1])
    return GaussianW(random(*shape, seed=seed), random(*shape, seed=seed + 1).exp(), bias)


def test_logits_are_distributed_as_under_draws_of_the_whole_classifier() -> None:
    z, w, draws = random(3, 5, seed=0), classifier(3, 4, 5, seed=1), 100_000
    cheap = generated_logits(z, w, random(draws, 3, 4, seed=8))
    rows = w.mean + w.std * random(draws, 3, 4, 5, seed=9)
    whole = torch.einsum("nd,sncd->snc", z, rows) + w.bias
    spread = whole.std(0)
    assert ((cheap.mean(0) - whole.mean(0)).abs() < 6 * spread / draws**0.5).all()
    torch.testing.assert_close(cheap.std(0), spread, rtol=0.02, atol=0)


def test_without_noise_they_are_those_of_the_mean() -> None:
    z, w = random(3, 5, seed=0), classifier(3, 4, 5, seed=1)
    found = generated_logits(z, w, torch.zeros(1, 1, 4, dtype=z.dtype))
    for i in range(3):
        torch.testing.assert_close(found[0, i], w.mean[i] @ z[i] + w.bias[i])


def test_one_classifier_may_serve_all_images() -> None:
    z, w, noise = random(3, 5, seed=0), classifier(4, 5, seed=1), random(2, 3, 4, seed=7)
    each = GaussianW(*(value.expand(3, *value.shape) for value in w))
    torch.testing.assert_close(generated_logits(z, w, noise), generated_logits(z, each, noise))


def test_the_divergence_is_the_sum_over_classes_that_are_present() -> None:
    q, p = classifier(3, 4, 5, seed=1), classifier(4, 5, seed=11)
    present = torch.tensor([True, False, True, True])
    expected = kl_divergence(Normal(q.mean, q.std), Normal(p.mean, p.std))[:, present].sum()
    torch.testing.assert_close(generated_kl(q, p, present), expected)
