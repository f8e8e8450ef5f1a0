import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.nn import functional as F

from vicinal.functional.losses import (
    entropies,
    gaussian_kl,
    label_cross_entropy,
    prediction_entropy,
    soft_cross_entropy,
)
from vicinal.functional.trust import entropy_of
from vicinal.types import GaussianW


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussian(classes: int = 4, features: int = 3, seed: int = 0) -> GaussianW:
    return GaussianW(
        normal(classes, features, seed=seed),
        normal(classes, features, seed=seed + 1).exp(),
        normal(classes, seed=seed + 2),
    )


def torch_kl(q: GaussianW, p: GaussianW) -> Tensor:
    """The KL of each class as torch.distributions has it, over the number of features."""
    rows = [Independent(Normal(w.mean, w.std), 1) for w in (q, p)]
    return kl_divergence(*rows) / q.mean.shape[-1]


@pytest.mark.parametrize("seed", range(3))
def test_soft_cross_entropy_agrees_with_torch(seed: int) -> None:
    logits, y = 3 * normal(8, 5, seed=seed), normal(8, 5, seed=seed + 50).softmax(-1)
    torch.testing.assert_close(soft_cross_entropy(logits, y), F.cross_entropy(logits, y))
    classes = torch.arange(8) % 5
    one_hot = F.one_hot(classes, 5).double()
    torch.testing.assert_close(soft_cross_entropy(logits, one_hot), F.cross_entropy(logits, classes))


def test_soft_cross_entropy_is_finite_for_extreme_logits() -> None:
    logits = torch.tensor([[1e4, -1e4]])
    assert float(soft_cross_entropy(logits, torch.tensor([[0.0, 1.0]]))) == pytest.approx(2e4)
    assert float(soft_cross_entropy(logits, torch.tensor([[1.0, 0.0]]))) == 0


def test_label_cross_entropy_agrees_with_torch() -> None:
    y_hat, y_true = normal(8, 5).softmax(-1), torch.arange(8) % 5
    torch.testing.assert_close(label_cross_entropy(y_hat, y_true), F.nll_loss(y_hat.log(), y_true))
    grouped = label_cross_entropy(y_hat.view(2, 4, 5), y_true.view(2, 4))
    torch.testing.assert_close(grouped, F.nll_loss(y_hat.log(), y_true))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_label_sure_of_the_wrong_class_costs_much_but_not_infinity(dtype: torch.dtype) -> None:
    y_hat = torch.tensor([[1.0, 0.0]], dtype=dtype, requires_grad=True)
    loss = label_cross_entropy(y_hat, torch.tensor([1]))
    assert 50 < float(loss.detach()) < math.inf
    (grad,) = torch.autograd.grad(loss, y_hat)
    assert bool(grad.isfinite().all())


def test_prediction_entropy_agrees_with_torch() -> None:
    logits = 3 * normal(8, 5)
    torch.testing.assert_close(entropies(logits), Categorical(logits=logits).entropy())
    torch.testing.assert_close(entropy_of(logits.softmax(-1)), entropies(logits))
    torch.testing.assert_close(prediction_entropy(logits), Categorical(logits=logits).entropy().mean())
    assert float(prediction_entropy(torch.zeros(2, 5))) == pytest.approx(math.log(5))
    sure = torch.tensor([[1e4, 0.0, 0.0]], requires_grad=True)
    entropy = prediction_entropy(sure)
    assert float(entropy.detach()) == 0
    (grad,) = torch.autograd.grad(entropy, sure)
    assert bool(grad.isfinite().all())


def test_the_entropy_is_the_cross_entropy_with_the_soft_label() -> None:
    logits = normal(8, 5)
    torch.testing.assert_close(prediction_entropy(logits), soft_cross_entropy(logits, logits.softmax(-1)))


@pytest.mark.parametrize("seed", range(3))
def test_gaussian_kl_agrees_with_torch(seed: int) -> None:
    q, p = gaussian(seed=seed), gaussian(seed=seed + 50)
    everyone = torch.ones(4, dtype=torch.bool)
    torch.testing.assert_close(gaussian_kl(q, p, everyone), torch_kl(q, p).mean())
    assert not math.isclose(float(gaussian_kl(q, p, everyone)), float(gaussian_kl(p, q, everyone)))


def test_gaussian_kl_leaves_absent_classes_out() -> None:
    q, p = gaussian(), gaussian(seed=50)
    present = torch.tensor([True, False, False, True])
    torch.testing.assert_close(gaussian_kl(q, p, present), torch_kl(q, p)[present].mean())
    leaves = [part.requires_grad_() for part in (q.mean, q.std, p.mean, p.std)]
    for grad in torch.autograd.grad(gaussian_kl(q, p, present), leaves):
        assert grad[~present].abs().sum() == 0
        assert grad[present].abs().sum() > 0


def test_gaussian_kl_of_no_class_is_zero() -> None:
    assert float(gaussian_kl(gaussian(), gaussian(seed=50), torch.zeros(4, dtype=torch.bool))) == 0


def test_gaussian_kl_over_groups_is_a_mean_over_all_rows_present() -> None:
    parts = [(gaussian(seed=seed), gaussian(seed=seed + 50)) for seed in (0, 10)]
    q, p = (
        GaussianW(*(torch.stack(pair) for pair in zip(*side, strict=True)))
        for side in zip(*parts, strict=True)
    )
    present = torch.tensor([[True, False, True, True], [False, False, True, False]])
    torch.testing.assert_close(gaussian_kl(q, p, present), torch_kl(q, p)[present].mean())


@settings(max_examples=40, deadline=None)
@given(
    shift=st.floats(-3, 3),
    ratio=st.floats(0.05, 20),
    spread=st.floats(1e-3, 10),
    features=st.integers(1, 6),
)
def test_gaussian_kl_is_never_negative_and_zero_only_for_equals(
    shift: float, ratio: float, spread: float, features: int
) -> None:
    p = GaussianW(normal(2, features), torch.full((2, features), spread, dtype=torch.float64), normal(2))
    q = p._replace(mean=p.mean + shift * spread, std=ratio * p.std)
    everyone = torch.ones(2, dtype=torch.bool)
    kl = float(gaussian_kl(q, p, everyone))
    # In units of the prior's spread: (ratio^2 + shift^2 - 1) / 2 - log ratio, whatever the spread is.
    assert kl == pytest.approx((ratio**2 + shift**2 - 1) / 2 - math.log(ratio), abs=1e-9)
    assert kl >= -1e-12
    assert float(gaussian_kl(p, p, everyone)) == 0


def test_losses_have_the_right_gradients() -> None:
    logits, y = normal(5, 4).requires_grad_(), normal(5, 4, seed=1).softmax(-1).requires_grad_()
    assert torch.autograd.gradcheck(soft_cross_entropy, (logits, y))
    assert torch.autograd.gradcheck(prediction_entropy, (logits,))
    classes = torch.arange(5) % 4
    assert torch.autograd.gradcheck(lambda y_hat: label_cross_entropy(y_hat, classes), (y,))


def test_gaussian_kl_has_the_right_gradient() -> None:
    q, p = gaussian(), gaussian(seed=50)
    leaves = tuple(part.requires_grad_() for part in (q.mean, q.std, p.mean, p.std))
    present = torch.tensor([True, False, True, True])

    def kl(q_mean: Tensor, q_std: Tensor, p_mean: Tensor, p_std: Tensor) -> Tensor:
        return gaussian_kl(GaussianW(q_mean, q_std, q.bias), GaussianW(p_mean, p_std, p.bias), present)

    assert torch.autograd.gradcheck(kl, leaves)


def test_half_precision_stays_close() -> None:
    logits, y = 3 * normal(64, 5).bfloat16(), normal(64, 5, seed=1).softmax(-1).bfloat16()
    exact, labels = logits.double(), y.double()
    pairs = [
        (soft_cross_entropy(logits, y), soft_cross_entropy(exact, labels)),
        (prediction_entropy(logits), prediction_entropy(exact)),
        (label_cross_entropy(y, torch.arange(64) % 5), label_cross_entropy(labels, torch.arange(64) % 5)),
    ]
    q, p = (GaussianW(*(part.bfloat16() for part in gaussian(seed=seed))) for seed in (0, 50))
    exact_q, exact_p = (GaussianW(*(part.double() for part in w)) for w in (q, p))
    everyone = torch.ones(4, dtype=torch.bool)
    pairs.append((gaussian_kl(q, p, everyone), gaussian_kl(exact_q, exact_p, everyone)))
    for half, full in pairs:
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.double(), full, rtol=0.03, atol=0)
