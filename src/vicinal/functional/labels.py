"""The label family: hard, soft, probabilistic and neighbor labels, as distributions over classes."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.types import GaussianW


def hard_labels(logits: Tensor) -> Tensor:
    """Return the one-hot argmax of the predictions (..., N, C): the common pseudo label."""
    return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)


def soft_labels(logits: Tensor) -> Tensor:
    """Return the predictions themselves (..., N, C)."""
    return logits.softmax(-1)


def probabilistic_labels(
    logits: Tensor, num_samples: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return the mean of one-hot draws from the predicted categoricals (N, C), Eq. (3).

    The loss is linear in the label, so the mean of the draws gives the mean of their losses.
    """
    return draw_one_hot(logits.softmax(-1), num_samples, generator)


def draw_one_hot(y: Tensor, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Return the mean of `num_samples` one-hot draws from each categorical of y (N, C).

    NaN for a row that is not finite: nothing can be drawn from it, and the others are drawn all the same.
    """
    known = y.isfinite().all(-1, keepdim=True)
    draws = torch.multinomial(torch.where(known, y, 1.0), num_samples, replacement=True, generator=generator)
    return F.one_hot(draws, y.shape[-1]).to(y.dtype).mean(-2).masked_fill(~known, torch.nan)


def class_means(z: Tensor, assignments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean feature of every class (..., C, d) and which classes are present (..., C).

    mean_c = sum_i a[i, c] z[i] / sum_i a[i, c]; an absent class has mean zero and present False.
    """
    weights = assignments.sum(-2)
    sums = assignments.transpose(-1, -2) @ z
    present = weights > 0
    return sums / weights.clamp_min(torch.finfo(z.dtype).tiny).unsqueeze(-1), present


def neighbor_labels(
    z: Tensor, w: GaussianW, num_samples: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return y_hat (..., N, C): what the latent classifier w says of each sample, Eq. (5).

    y_hat = (1/S) sum_s softmax(z w_s' + b), w_s = mean + std * noise_s. With no samples the mean of w is
    used. The draws are reparametrised, so gradients reach whatever made w.
    """
    if num_samples == 0:
        return linear_logits(z, w.mean, w.bias).softmax(-1)
    return neighbor_draws(z, w, num_samples, generator).mean(0)


def neighbor_draws(
    z: Tensor, w: GaussianW, num_samples: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return what each draw of the latent classifier says of each sample (S, ..., N, C), Eq. (5)."""
    return drawn_labels(z, w, noise_like(w.mean, num_samples, generator))


def noise_like(rows: Tensor, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
    """Return standard normal noise (S, ...) for draws of rows."""
    shape = (num_samples, *rows.shape)
    return torch.randn(shape, generator=generator, device=rows.device, dtype=rows.dtype)


def drawn_labels(z: Tensor, w: GaussianW, noise: Tensor) -> Tensor:
    """Return softmax(z w_s' + b) of each sample (S, ..., N, C), w_s = mean + std * noise_s."""
    return linear_logits(z, w.mean + w.std * noise, w.bias).softmax(-1)


def linear_logits(z: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
    """Return z rows' + bias with any leading dimensions (..., N, C)."""
    return z @ rows.transpose(-1, -2) + bias.unsqueeze(-2)
