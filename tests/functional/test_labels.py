import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal

from vicinal.functional.labels import (
    class_means,
    draw_one_hot,
    hard_labels,
    linear_logits,
    neighbor_labels,
    probabilistic_labels,
    soft_labels,
)
from vicinal.types import GaussianW


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def gaussian(classes: int = 4, features: int = 3, seed: int = 0) -> GaussianW:
    return GaussianW(
        normal(classes, features, seed=seed),
        normal(classes, features, seed=seed + 1).exp(),
        normal(classes, seed=seed + 2),
    )


def plain_softmax(scores: list[float]) -> list[float]:
    exps = [math.exp(score) for score in scores]
    return [value / sum(exps) for value in exps]


def neighbor_labels_by_loop(z: Tensor, w: GaussianW, noise: Tensor) -> Tensor:
    total = torch.zeros(len(z), len(w.bias), dtype=torch.float64)
    for draw in noise:
        for i, sample in enumerate(z.tolist()):
            scores = []
            for c, bias in enumerate(w.bias.tolist()):
                row = [float(w.mean[c, k] + w.std[c, k] * draw[c, k]) for k in range(len(sample))]
                scores.append(sum(a * b for a, b in zip(row, sample, strict=True)) + bias)
            total[i] += torch.tensor(plain_softmax(scores), dtype=torch.float64)
    return total / len(noise)


def test_hard_labels_are_the_one_hot_argmax() -> None:
    logits = torch.tensor([[0.1, 2.0, -1.0], [5.0, 4.9, 0.0]])
    assert hard_labels(logits).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert hard_labels(logits.bfloat16()).dtype == torch.bfloat16


def test_soft_labels_are_the_predictions() -> None:
    logits = normal(5, 4)
    expected = torch.tensor([plain_softmax(row) for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(soft_labels(logits), expected)


@pytest.mark.parametrize("num_samples", [1, 10])
def test_probabilistic_labels_are_means_of_one_hot_draws(num_samples: int) -> None:
    labels = probabilistic_labels(normal(50, 6), num_samples, seeded())
    torch.testing.assert_close(labels.sum(-1), torch.ones(50, dtype=torch.float64))
    counts = labels * num_samples
    torch.testing.assert_close(counts, counts.round())


def test_probabilistic_labels_have_the_predictions_as_expectation() -> None:
    logits = normal(3, 5)
    num_samples = 40_000
    expected = logits.softmax(-1)
    # Five standard errors of a binomial share.
    allowed = 5 * (expected * (1 - expected) / num_samples).sqrt()
    off = (probabilistic_labels(logits, num_samples, seeded()) - expected).abs()
    assert bool((off <= allowed).all())
    assert bool((off > 0).any())  # draws, not the probabilities themselves


def test_draws_repeat_with_the_seed_and_never_hit_a_class_of_probability_zero() -> None:
    y = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]])
    first = draw_one_hot(y, 200, seeded(3))
    assert torch.equal(first, draw_one_hot(y, 200, seeded(3)))
    assert not torch.equal(first, draw_one_hot(y, 200, seeded(4)))
    assert float(first[0, 1]) == 0
    assert first[1].tolist() == [0, 1, 0]


def test_a_row_that_is_not_finite_has_no_draws_and_changes_none_of_the_others() -> None:
    y = torch.tensor([[0.2, 0.8], [torch.nan, torch.nan], [0.5, 0.5], [torch.inf, 0.0]])
    found = draw_one_hot(y, 6, seeded())
    assert found[[1, 3]].isnan().all()
    assert torch.equal(found[[0, 2]].sum(-1), torch.ones(2))
    sound = torch.where(y.isfinite(), y, 1.0)
    assert torch.equal(found[[0, 2]], draw_one_hot(sound, 6, seeded())[[0, 2]])


@pytest.mark.parametrize("num_samples", [1, 2, 7])
def test_neighbor_labels_agree_with_a_loop_over_samples(num_samples: int) -> None:
    z, w = normal(6, 3, seed=9), gaussian()
    noise = torch.randn(num_samples, 4, 3, generator=seeded(5), dtype=torch.float64)
    torch.testing.assert_close(
        neighbor_labels(z, w, num_samples, seeded(5)), neighbor_labels_by_loop(z, w, noise)
    )


def test_no_samples_and_no_spread_both_use_the_mean_of_w() -> None:
    z, w = normal(6, 3, seed=9), gaussian()
    by_mean = neighbor_labels_by_loop(z, w, torch.zeros(1, 4, 3))
    torch.testing.assert_close(neighbor_labels(z, w, 0), by_mean)
    narrow = w._replace(std=torch.zeros_like(w.std))
    torch.testing.assert_close(neighbor_labels(z, narrow, 5, seeded()), by_mean)


def test_the_draws_have_the_mean_and_spread_of_w() -> None:
    z, w = normal(4, 3, seed=9), gaussian()
    torch.manual_seed(1)
    rows = Normal(w.mean, w.std).sample((20_000,))
    expected = torch.einsum("nd,scd->snc", z, rows).add(w.bias).softmax(-1).mean(0)
    # Two independent means of values in [0, 1], each of standard error at most 0.5 / sqrt(20,000).
    torch.testing.assert_close(neighbor_labels(z, w, 20_000, seeded()), expected, rtol=0, atol=0.02)
    assert not torch.allclose(neighbor_labels(z, w, 0), expected, rtol=0, atol=0.02)


def test_groups_are_labelled_each_by_its_own_classifier() -> None:
    z = normal(2, 6, 3, seed=9)
    parts = [gaussian(seed=seed) for seed in (0, 10)]
    both = GaussianW(*(torch.stack(pair) for pair in zip(*parts, strict=True)))
    noise = torch.randn(4, 2, 4, 3, generator=seeded(5), dtype=torch.float64)
    labels = neighbor_labels(z, both, 4, seeded(5))
    for group, w in enumerate(parts):
        torch.testing.assert_close(labels[group], neighbor_labels_by_loop(z[group], w, noise[:, group]))


def test_gradients_of_neighbor_labels_reach_features_and_everything_that_made_w() -> None:
    leaves = [tensor.requires_grad_() for tensor in (normal(5, 3, seed=9), *gaussian())]

    def fixed_noise(z: Tensor, mean: Tensor, std: Tensor, bias: Tensor) -> Tensor:
        return neighbor_labels(z, GaussianW(mean, std, bias), 3, seeded(5))

    assert torch.autograd.gradcheck(fixed_noise, leaves)
    grads = torch.autograd.grad(fixed_noise(*leaves).square().sum(), leaves)
    assert all(float(grad.norm()) > 0 for grad in grads)


@pytest.mark.parametrize("one_hot", [True, False])
def test_class_means_agree_with_a_loop_over_classes(one_hot: bool) -> None:
    z, logits = normal(12, 3), normal(12, 4, seed=1)
    assignments = hard_labels(logits) if one_hot else soft_labels(logits)
    means, present = class_means(z, assignments)
    for c in range(4):
        if one_hot:
            expected = z[logits.argmax(-1) == c].mean(0)
        else:
            expected = sum(float(a) * row for a, row in zip(assignments[:, c], z, strict=True))
            expected = expected / float(assignments[:, c].sum())
        torch.testing.assert_close(means[c], expected)
    assert present.all()


def test_an_absent_class_has_mean_zero_and_is_not_present() -> None:
    z = normal(3, 2)
    means, present = class_means(z, torch.eye(4, dtype=torch.float64)[torch.tensor([0, 3, 0])])
    assert present.tolist() == [True, False, False, True]
    assert means[1:3].abs().sum() == 0
    torch.testing.assert_close(means[0], (z[0] + z[2]) / 2)
    torch.testing.assert_close(means[3], z[1])


def test_one_sample_is_the_mean_of_its_class() -> None:
    z = normal(1, 3)
    means, present = class_means(z, torch.tensor([[0.0, 1.0]], dtype=torch.float64))
    assert present.tolist() == [False, True]
    torch.testing.assert_close(means[1], z[0])


def test_one_class_has_the_mean_of_the_batch() -> None:
    z = normal(7, 3)
    means, present = class_means(z, torch.ones(7, 1, dtype=torch.float64))
    assert present.tolist() == [True]
    torch.testing.assert_close(means[0], z.mean(0))


def test_an_absent_class_passes_no_gradient_to_the_features() -> None:
    z = normal(3, 2).requires_grad_()
    means, present = class_means(z, torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64))
    (grad,) = torch.autograd.grad(means[~present].sum(), z)
    assert grad.abs().sum() == 0


def test_class_means_have_the_right_gradient() -> None:
    z, assignments = normal(5, 3), soft_labels(normal(5, 4, seed=1))
    leaves = (z.requires_grad_(), assignments.requires_grad_())
    assert torch.autograd.gradcheck(lambda *args: class_means(*args)[0], leaves)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 12), classes=st.integers(1, 6))
def test_class_means_hold_together_for_any_batch(seed: int, count: int, classes: int) -> None:
    z, labels = normal(count, 3, seed=seed), torch.randint(classes, (count,), generator=seeded(seed))
    assignments = torch.eye(classes, dtype=torch.float64)[labels]
    means, present = class_means(z, assignments)
    assert present.tolist() == [c in labels for c in range(classes)]
    # The means, each counted as often as its class, give back the sum of the features.
    torch.testing.assert_close(assignments.sum(0) @ means, z.sum(0))
    order = torch.randperm(count, generator=seeded(seed))
    torch.testing.assert_close(class_means(z[order], assignments[order])[0], means)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3), num_samples=st.integers(0, 4))
def test_neighbor_labels_are_distributions_at_any_scale(seed: int, scale: float, num_samples: int) -> None:
    labels = neighbor_labels(scale * normal(5, 3, seed=seed), gaussian(seed=seed), num_samples, seeded(seed))
    assert bool((labels >= 0).all())
    torch.testing.assert_close(labels.sum(-1), torch.ones(5, dtype=torch.float64))


def test_linear_logits_are_those_of_a_linear_layer() -> None:
    z, rows, bias = normal(2, 5, 3), normal(4, 3, seed=1), normal(4, seed=2)
    torch.testing.assert_close(linear_logits(z, rows, bias), torch.nn.functional.linear(z, rows, bias))


def test_half_precision_stays_close() -> None:
    z, w = normal(20, 8), gaussian(5, 8, seed=3)
    w = w._replace(std=0.1 * w.std)
    z16, w16 = z.bfloat16(), GaussianW(*(part.bfloat16() for part in w))
    exact = neighbor_labels(z16.double(), GaussianW(*(part.double() for part in w16)), 0)
    labels = neighbor_labels(z16, w16, 0)
    assert labels.dtype == torch.bfloat16
    torch.testing.assert_close(labels.double(), exact, rtol=0, atol=0.05)
    assert bool(neighbor_labels(z16, w16, 4, seeded()).isfinite().all())
    means, present = class_means(z16, hard_labels(z16[:, :5]))
    reference, _ = class_means(z16.double(), hard_labels(z16[:, :5].double()))
    assert present.all()
    torch.testing.assert_close(means.double(), reference, rtol=0.02, atol=0.02)
    drawn = probabilistic_labels(z16, 10, seeded())
    assert drawn.dtype == torch.bfloat16
    torch.testing.assert_close(drawn.double().sum(-1), torch.ones(20, dtype=torch.float64), rtol=0, atol=0.02)
