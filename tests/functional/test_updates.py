from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from vicinal.functional.labels import neighbor_labels
from vicinal.functional.updates import Logits, Params, SecondOrder, gradient_at, second_order, sgd_step
from vicinal.types import GaussianW

CLASSES, FEATURES, STEP, EPSILON = 4, 3, 0.5, 1e-6


class Problem(NamedTuple):
    net: nn.Module
    theta: dict[str, Tensor]
    logits: Logits
    y_true: Tensor
    phi: nn.Module
    y_hat: Tensor  # differentiable with respect to phi


def mlp() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Softplus(), nn.Linear(6, CLASSES))
    return net, torch.randn(9, 5)


def conv_with_batch_norm() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 6, 3, stride=2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )
    return net.train(), torch.randn(9, 2, 6, 6)


def labels_from(phi: nn.Module, z: Tensor) -> Tensor:
    """A phi in miniature: from a batch to Gaussian rows to neighbor labels with fixed noise."""
    mean, raw = phi(z.mean(0)).view(2, CLASSES, FEATURES)
    w = GaussianW(mean, F.softplus(raw), torch.zeros(CLASSES, dtype=z.dtype))
    return neighbor_labels(z, w, 3, torch.Generator().manual_seed(7))


def problem(make: Callable[[], tuple[nn.Module, Tensor]], dtype: torch.dtype = torch.float64) -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = make()
        phi = nn.Linear(FEATURES, 2 * CLASSES * FEATURES).to(dtype)
        z = torch.randn(len(x), FEATURES).to(dtype)
    net, x = net.to(dtype), x.to(dtype)

    def logits(theta: Params) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        return functional_call(net, {**theta, **buffers}, (x,))

    theta = {name: value.detach().clone() for name, value in net.named_parameters()}
    return Problem(net, theta, logits, torch.arange(len(x)) % CLASSES, phi, labels_from(phi, z))


def brute_force(p: Problem, step: float) -> tuple[list[Tensor], list[Tensor]]:
    """dL/dtheta and dL/dphi of the outer loss, by differentiating through the inner backward pass."""
    leaves = {name: value.clone().requires_grad_() for name, value in p.theta.items()}
    inner = F.cross_entropy(p.logits(leaves), p.y_hat)
    grads = torch.autograd.grad(inner, list(leaves.values()), create_graph=True)
    star = {name: leaf - step * grad for (name, leaf), grad in zip(leaves.items(), grads, strict=True)}
    outer = F.cross_entropy(p.logits(star), p.y_true)
    both = torch.autograd.grad(outer, [*leaves.values(), *p.phi.parameters()], retain_graph=True)
    return list(both[: len(leaves)]), list(both[len(leaves) :])


def outer_gradient(p: Problem, step: float) -> dict[str, Tensor]:
    gradient, _ = gradient_at(p.logits, p.theta, p.y_hat.detach())
    star = {k: value.requires_grad_() for k, value in sgd_step(p.theta, gradient, step).items()}
    outer = F.cross_entropy(p.logits(star), p.y_true)
    return dict(zip(star, torch.autograd.grad(outer, list(star.values())), strict=True))


def relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    a, b = (torch.cat([part.flatten() for part in parts]).double() for parts in (found, expected))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("make", [mlp, conv_with_batch_norm])
def test_second_order_agrees_with_double_backward(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    p = problem(make)
    v = outer_gradient(p, STEP)
    found = second_order(p.logits, p.theta, p.y_hat.detach(), v, STEP, EPSILON)
    for_theta, for_phi = brute_force(p, STEP)

    ours = [v[name] - STEP * found.hessian_v[name] for name in p.theta]
    assert relative_error(ours, for_theta) < 1e-6
    correction = [(v[name] - exact) / STEP for name, exact in zip(p.theta, for_theta, strict=True)]
    assert relative_error([found.hessian_v[name] for name in p.theta], correction) < 1e-6
    # The first order alone would miss by far more than the tolerance.
    assert relative_error(list(v.values()), for_theta) > 1e-3

    through_labels = torch.autograd.grad(p.y_hat, list(p.phi.parameters()), found.label_gradient)
    assert relative_error(list(through_labels), for_phi) < 1e-6


@pytest.mark.parametrize("make", [mlp, conv_with_batch_norm])
def test_the_step_size_does_not_enter_the_curvature(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    p = problem(make)
    v = outer_gradient(p, STEP)
    small, large = (
        second_order(p.logits, p.theta, p.y_hat.detach(), v, step, EPSILON) for step in (1e-4, 1.0)
    )
    for name in p.theta:
        torch.testing.assert_close(small.hessian_v[name], large.hessian_v[name])
    torch.testing.assert_close(small.label_gradient, 1e-4 * large.label_gradient)


def test_batch_norm_statistics_of_the_module_are_untouched() -> None:
    p = problem(conv_with_batch_norm)
    before = {name: value.clone() for name, value in p.net.state_dict().items()}
    second_order(p.logits, p.theta, p.y_hat.detach(), outer_gradient(p, STEP), STEP, EPSILON)
    for name, value in p.net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_single_precision_is_right_to_a_percent() -> None:
    p = problem(mlp, torch.float32)
    v = outer_gradient(p, STEP)
    found = second_order(p.logits, p.theta, p.y_hat.detach(), v, STEP, 1e-2)
    for_theta, for_phi = brute_force(p, STEP)
    correction = [(v[name] - exact) / STEP for name, exact in zip(p.theta, for_theta, strict=True)]
    assert relative_error([found.hessian_v[name] for name in p.theta], correction) < 1e-2
    through_labels = torch.autograd.grad(p.y_hat, list(p.phi.parameters()), found.label_gradient)
    assert relative_error(list(through_labels), for_phi) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_outer_gradient_of_zero_adds_nothing(dtype: torch.dtype) -> None:
    p = problem(mlp, dtype)
    v = {name: torch.zeros_like(value) for name, value in p.theta.items()}
    hessian_v, label_gradient = second_order(p.logits, p.theta, p.y_hat.detach(), v, STEP, 1e-2)
    assert all(float(part.abs().sum()) == 0 for part in hessian_v.values())
    assert float(label_gradient.abs().sum()) == 0


def test_second_order_builds_no_graph() -> None:
    p = problem(mlp)
    found = second_order(p.logits, p.theta, p.y_hat, outer_gradient(p, STEP), STEP, EPSILON)
    assert isinstance(found, SecondOrder)
    assert not found.label_gradient.requires_grad
    assert not any(part.requires_grad for part in found.hessian_v.values())


def test_sgd_step_agrees_with_torch() -> None:
    net, x = mlp()
    theta = {name: value.detach().clone() for name, value in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    F.cross_entropy(net(x), torch.arange(9) % CLASSES).backward()
    gradient = {name: value.grad for name, value in net.named_parameters()}
    kept = {name: value.clone() for name, value in theta.items()}
    stepped = sgd_step(theta, gradient, 0.3)
    optimizer.step()
    for name, value in net.named_parameters():
        torch.testing.assert_close(stepped[name], value.detach())
        assert torch.equal(theta[name], kept[name])  # the step is a new set of parameters


def test_gradient_at_agrees_with_backward() -> None:
    p = problem(mlp)
    y = p.y_hat.detach()
    gradient, log_p = gradient_at(p.logits, p.theta, y)
    p.net.zero_grad()
    out = p.logits(dict(p.net.named_parameters()))
    F.cross_entropy(out, y).backward()
    for name, value in p.net.named_parameters():
        torch.testing.assert_close(gradient[name], value.grad)
    torch.testing.assert_close(log_p, out.detach().softmax(-1).log())
    assert not log_p.requires_grad


def test_gradient_at_works_without_grad_mode_and_leaves_theta_alone() -> None:
    p = problem(mlp)
    expected, _ = gradient_at(p.logits, p.theta, p.y_hat.detach())
    with torch.no_grad():
        gradient, _ = gradient_at(p.logits, p.theta, p.y_hat.detach())
    for name, value in p.theta.items():
        assert torch.equal(gradient[name], expected[name])
        assert not value.requires_grad
        assert value.grad is None


def test_a_parameter_the_loss_does_not_see_has_gradient_zero() -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    theta = {"rows": torch.ones(CLASSES, 3), "unused": torch.ones(2)}
    y = torch.full((6, CLASSES), 1 / CLASSES)
    gradient, _ = gradient_at(lambda parts: x @ parts["rows"].T, theta, y)
    assert gradient["unused"].tolist() == [0, 0]
