"""Classifiers that are generated for one image each: their logits and their divergence."""

import torch
from torch import Tensor

from vicinal.types import GaussianW


def generated_logits(z: Tensor, w: GaussianW, noise: Tensor) -> Tensor:
    """Return logits (S, N, C) of features (N, d) under draws of w, its rows (N, C, d), or (C, d) for all.

    A draw of w enters as z'w alone, which is Gaussian with mean z'mean and variance sum_d z_d^2 std_d^2: that
    is what the noise (S, N or 1, C) draws, instead of all d numbers of every row.
    """
    features = z.unsqueeze(-2)
    mean = (features * w.mean).sum(-1) + w.bias
    spread = (features * w.std).norm(dim=-1)
    logits: Tensor = mean + spread * noise
    return logits


def generated_kl(q: GaussianW, p: GaussianW, present: Tensor) -> Tensor:
    """Return KL[q || p] of classifiers q (N, C, d) from p (C, d), a sum over images, classes and features.

    Classes that are not present have no p to compare with.
    """
    ratio = (q.std / p.std).square()
    shift = ((q.mean - p.mean) / p.std).square()
    each = 0.5 * (ratio + shift - 1 - ratio.log()).sum(-1)
    return torch.where(present, each, torch.zeros_like(each)).sum()
