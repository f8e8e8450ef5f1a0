"""Class shares: against loops over images and classes, and against streams whose shares are known."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from vicinal.functional.shares import (
    believed_shares,
    doubt_share,
    effective_images,
    equalizing_weights,
    likely_shares,
    mean_square,
    share_distance,
    share_divergence,
    sharpened,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_sharpened_labels_are_squared_predictions() -> None:
    logits = normal(5, 4)
    p = logits.softmax(-1).square()
    torch.testing.assert_close(sharpened(logits), p / p.sum(-1, keepdim=True))


def test_doubt_is_a_share_of_the_known_one_and_never_more() -> None:
    for s, u_0, expected in ((0.95, 0.1, 0.5), (0.9, 0.1, 1.0), (0.4, 0.1, 1.0), (1.0, 0.1, 0.0)):
        torch.testing.assert_close(doubt_share(number(s), u_0), number(expected))
    for s, expected in ((0.9, 1.0), (1.0, 0.0)):
        torch.testing.assert_close(doubt_share(number(s), 0.0), number(expected))


def test_the_mean_square_is_one_for_sure_labels_and_one_over_the_classes_for_none() -> None:
    torch.testing.assert_close(mean_square(torch.eye(4)[[0, 2, 2]]), torch.tensor(1.0))
    torch.testing.assert_close(mean_square(torch.full((3, 4), 0.25)), torch.tensor(0.25))
    y = normal(6, 4).softmax(-1)
    torch.testing.assert_close(mean_square(y), number(sum(float(v) ** 2 for row in y for v in row) / 6))


@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("batches", [1, 3, 40])
def test_effective_images_are_those_of_the_weights(batch: int, batches: int) -> None:
    """(sum w)^2 / sum w^2 of the weights that images have in a fading average, batches of them at a time."""
    window, fade = 400.0, math.exp(-batch / 400.0)
    weights = np.repeat((1 - fade) / batch * fade ** np.arange(batches), batch)
    exact = weights.sum() ** 2 / (weights**2).sum()
    found = float(effective_images(number(weights.sum()), window))
    assert found == pytest.approx(exact, rel=2e-3)


def slow_shares(m: list[float], s: float, n: float) -> list[float]:
    """The docstring's formula, class by class."""
    classes = len(m)
    unequal = sum((classes * share - 1) ** 2 for share in m) / classes - (classes - 1) / n
    sure = max(0.2, (s - 1 / classes) / (1 - 1 / classes))
    g = min(1 / sure, 4 * math.sqrt(max(0.0, unequal)))
    powers = [(share + 1e-2 / classes) ** g for share in m]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize("spread", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("s", [0.2, 0.5, 0.95])
@pytest.mark.parametrize("n", [20.0, 200.0])
def test_likely_shares_agree_with_the_formula(spread: float, s: float, n: float) -> None:
    m = (spread * normal(6)).softmax(0)
    found = likely_shares(m, number(s), number(n))
    torch.testing.assert_close(found, torch.tensor(slow_shares(m.tolist(), s, n), dtype=torch.float64))


def test_one_class_has_all() -> None:
    found = likely_shares(torch.ones(1), torch.tensor(1.0), torch.tensor(20.0))
    assert torch.equal(found, torch.ones(1))


@pytest.mark.parametrize("classes", [10, 65, 345])
def test_classes_that_sure_labels_never_see_stay_rare(classes: int) -> None:
    m = torch.zeros(classes, dtype=torch.float64)
    m[:5] = 0.2
    found = likely_shares(m, number(1.0), number(1e6))
    assert 0 < float(found[5:].sum()) < 0.02


def test_differences_that_chance_explains_are_levelled() -> None:
    m = torch.tensor([0.3, 0.25, 0.2, 0.25], dtype=torch.float64)
    torch.testing.assert_close(likely_shares(m, number(0.9), number(20.0)), torch.full_like(m, 0.25))


def test_what_unsure_labels_smear_is_brought_out() -> None:
    """Labels that show a half of the truth and spread the rest evenly: pi is nearer to the truth."""
    truth = torch.tensor([0.55, 0.3, 0.1, 0.05], dtype=torch.float64)
    m = 0.5 * truth + 0.5 * 0.25
    s = number(0.25 + 0.75 * 0.5)  # r = 0.5
    found = likely_shares(m, s, number(1e4))
    assert (found - truth).abs().max() < 0.5 * (m - truth).abs().max()


def test_sure_labels_of_a_skewed_stream_are_taken_at_their_word() -> None:
    m = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64)
    torch.testing.assert_close(likely_shares(m, number(1.0), number(1e6)), m, atol=5e-3, rtol=0)


@pytest.mark.parametrize("m", [[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.0, 0.5, 0.5]])
@pytest.mark.parametrize("s", [0.0, 1 / 3, 1.0])
def test_shares_at_the_edges_are_finite_and_of_every_class(m: list[float], s: float) -> None:
    found = likely_shares(torch.tensor(m), torch.tensor(s), torch.tensor(1e-3))
    assert (found > 0).all()
    torch.testing.assert_close(found.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("fade", [0.0, 0.3, 0.9])
def test_share_divergence_agrees_with_torch(fade: float) -> None:
    logits, predicted, expected = normal(7, 4), normal(4, seed=1).softmax(0), normal(4, seed=2).softmax(0)
    mixed = fade * predicted + (1 - fade) * sum(row.softmax(0) for row in logits) / 7
    reference = kl_divergence(Categorical(probs=expected), Categorical(probs=mixed)) / (1 - fade)
    torch.testing.assert_close(share_divergence(logits, predicted, expected, fade), reference)


def test_share_divergence_is_nothing_where_the_shares_agree() -> None:
    logits = normal(7, 4)
    shares = logits.softmax(-1).mean(0)
    torch.testing.assert_close(
        share_divergence(logits, shares, shares, 0.5), torch.zeros((), dtype=torch.float64)
    )


def test_the_pull_of_shares_does_not_depend_on_the_length_of_their_average() -> None:
    """Where the average so far is what the batch has, a longer one changes nothing for the batch."""
    expected, pulls = normal(4, seed=2).softmax(0), []
    for fade in (0.0, 0.5, 0.95):
        logits = normal(7, 4).requires_grad_()
        predicted = logits.detach().softmax(-1).mean(0)
        pulls += torch.autograd.grad(share_divergence(logits, predicted, expected, fade), logits)
    for pull in pulls[1:]:
        torch.testing.assert_close(pull, pulls[0])


def test_a_class_that_vanished_is_called_back() -> None:
    logits = torch.zeros(6, 3)
    logits[:, 0] = -60.0  # its probability is 1e-26
    logits.requires_grad_()
    predicted, expected = torch.tensor([0.0, 0.5, 0.5]), torch.full((3,), 1 / 3)
    (gradient,) = torch.autograd.grad(share_divergence(logits, predicted, expected, 0.7), logits)
    assert gradient.isfinite().all()
    # pi over six images and the batch's share of the average: nothing else is left in it.
    torch.testing.assert_close(gradient[:, 0], torch.full((6,), -1 / (3 * 6 * (1 - 0.7))))


@pytest.mark.parametrize("counts", [(3, 3, 3), (1, 5, 12), (7, 1, 1, 1)])
def test_weighted_images_are_as_many_of_each_class_and_as_many_in_all(counts: tuple[int, ...]) -> None:
    c = torch.tensor([label for label, count in enumerate(counts) for _ in range(count)])
    m = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    w = equalizing_weights(c, m)
    of_class = [float(w[c == label].sum()) for label in range(len(counts))]
    assert of_class == pytest.approx([sum(counts) / len(counts)] * len(counts))
    assert float(w.mean()) == pytest.approx(1.0)


def test_the_distance_of_shares_is_what_has_to_be_moved() -> None:
    for m, expected in (
        ([0.25] * 4, 0.0),
        ([1.0, 0, 0, 0], 0.75),
        ([0.5, 0.5, 0, 0], 0.5),
        ([0.4, 0.6], 0.1),
    ):
        moved = sum(max(0.0, share - 1 / len(m)) for share in m)
        assert float(share_distance(torch.tensor(m, dtype=torch.float64))) == pytest.approx(expected)
        assert moved == pytest.approx(expected)


def test_shares_are_believed_as_far_as_two_models_agree() -> None:
    m = torch.tensor([0.7, 0.2, 0.1, 0.0], dtype=torch.float64)
    equal = torch.full_like(m, 0.25)
    for a, expected in ((0.0, equal), (0.5, equal), (0.625, (m + equal) / 2), (0.75, m), (1.0, m)):
        torch.testing.assert_close(believed_shares(m, number(a)), expected)
