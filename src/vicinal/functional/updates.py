"""Parameter updates as pure functions: the inner step and the exact second order without double backward."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.functional.losses import soft_cross_entropy

Params = Mapping[str, Tensor]
Logits = Callable[[Params], Tensor]


def sgd_step(theta: Params, gradient: Params, step: float) -> dict[str, Tensor]:
    """Return theta - step * gradient, the plain step of Eq. (8)."""
    return moved(theta, gradient, -step)


def moved(theta: Params, direction: Params, step: float | Tensor) -> dict[str, Tensor]:
    """Return theta + step * direction, in few kernels; a step that is a tensor stays where it is."""
    along = torch._foreach_mul([direction[name] for name in theta], step)
    return dict(zip(theta, torch._foreach_add(list(theta.values()), along), strict=True))


def gradient_at(logits: Logits, theta: Params, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradient of CE(f_theta(x), y) and log p, both detached, at `theta`."""
    leaves = {name: value.detach().requires_grad_() for name, value in theta.items()}
    with torch.enable_grad():
        out = logits(leaves)
        loss = soft_cross_entropy(out, y)
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    filled = {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }
    return filled, F.log_softmax(out.detach(), -1)


class SecondOrder(NamedTuple):
    """What the inner step adds to the meta gradient."""

    hessian_v: dict[str, Tensor]  # H v, H the Hessian of the inner loss at theta
    label_gradient: Tensor  # dL/dy_hat (N, C)


def second_order(
    logits: Logits, theta: Params, y_hat: Tensor, v: Params, step: float, epsilon: float
) -> SecondOrder:
    """Return H v and dL/dy_hat by central differences along v, the gradient of the outer loss.

    With theta* = theta - step * g(theta, y_hat) and v = dL/dtheta*:
    dL/dtheta = v - step * H v, and, cross-entropy being linear in the label,
    dL/dy_hat[i, c] = (step / N) * d log p[i, c] along v.
    Both directional derivatives come from two gradient passes at theta +- epsilon v / |v|: no graph of a
    backward pass is ever built.
    """
    norm = torch.stack(torch._foreach_norm(list(v.values()))).norm()  # no number is looked at on the way
    scale = epsilon / norm.clamp_min(1e-12)
    plus, log_p_plus = gradient_at(logits, moved(theta, v, scale), y_hat)
    minus, log_p_minus = gradient_at(logits, moved(theta, v, -scale), y_hat)
    apart = torch._foreach_sub([plus[name] for name in theta], [minus[name] for name in theta])
    hessian_v = dict(zip(theta, torch._foreach_mul(apart, 1 / (2 * scale)), strict=True))
    along_v = (log_p_plus - log_p_minus) / (2 * scale)
    return SecondOrder(hessian_v, step / y_hat.shape[0] * along_v)
