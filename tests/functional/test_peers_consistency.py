import math

import torch

from vicinal.functional.peers_consistency import (
    contrastive_loss,
    feature_moments,
    marginal_entropy,
    moment_distances,
    quarter_turns,
    timeliness,
)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_marginal_entropy_is_that_of_the_mean_prediction() -> None:
    logits = 3 * noise(5, 4)
    mean = [sum(float(row.softmax(0)[c]) for row in logits) / 5 for c in range(4)]
    torch.testing.assert_close(float(marginal_entropy(logits)), -sum(p * math.log(p) for p in mean))


def test_marginal_entropy_and_its_gradient_are_finite_for_certain_predictions() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [1e4, 0.0, 0.0]], requires_grad=True)
    loss = marginal_entropy(logits)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.abs() < 1e-6
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_the_contrastive_loss_of_every_view_against_all_others() -> None:
    first, second = noise(3, 5), noise(3, 5, seed=1)
    views = [*first, *second]
    total = 0.0
    for i, view in enumerate(views):
        likes = [
            math.exp(float(view @ other / view.norm() / other.norm()) / 0.3) if j != i else 0.0
            for j, other in enumerate(views)
        ]
        total -= math.log(likes[(i + 3) % 6] / sum(likes)) / 6
    torch.testing.assert_close(float(contrastive_loss(first, second, 0.3)), total)


def test_one_image_alone_has_nothing_to_be_told_from() -> None:
    view = noise(1, 5).requires_grad_()
    loss = contrastive_loss(view, noise(1, 5, seed=1), 0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss == 0
    assert view.grad is not None
    assert (view.grad == 0).all()


def test_moments_and_their_distances() -> None:
    one, other = noise(7, 3), 2 * noise(6, 3, seed=1) + 1
    moments = feature_moments(one)
    torch.testing.assert_close(moments.mean, one.mean(0))
    torch.testing.assert_close(moments.covariance, torch.cov(one.T))
    means, covariances = moment_distances(moments, feature_moments(other))
    torch.testing.assert_close(means, (one.mean(0) - other.mean(0)).norm() ** 2 / 3)
    torch.testing.assert_close(covariances, (torch.cov(one.T) - torch.cov(other.T)).norm() ** 2 / 36)
    assert (feature_moments(one[:1]).covariance == 0).all()


def test_quarter_turns_go_counter_clockwise_and_each_image_its_own_way() -> None:
    x = torch.arange(4.0).view(1, 1, 2, 2).repeat(4, 1, 1, 1)  # 0 1 / 2 3
    turned = quarter_turns(x, torch.tensor([3, 0, 1, 2])).view(4, 4).int().tolist()
    assert turned == [[2, 0, 3, 1], [0, 1, 2, 3], [1, 3, 0, 2], [3, 2, 1, 0]]


def test_timeliness_halves_at_birth_and_falls_with_age() -> None:
    ages = torch.tensor([0.0, 1.0, 2.5])
    expected = [math.exp(-float(age)) / (1 + math.exp(-float(age))) for age in ages]
    torch.testing.assert_close(timeliness(ages), torch.tensor(expected))
