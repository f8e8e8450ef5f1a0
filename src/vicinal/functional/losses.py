"""Losses: cross-entropy with distributions as labels, entropy, and the KL of the latent classifier."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.types import GaussianW


def soft_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of predictions with labels that are distributions, a mean over samples.

    L_CE = -(1/N) sum_i sum_c y[i, c] log p[i, c]; the loss of Eq. (8) and Eq. (11).
    """
    return -(y * F.log_softmax(logits, dim=-1)).sum(-1).mean()


def label_cross_entropy(y_hat: Tensor, y_true: Tensor) -> Tensor:
    """Return the cross-entropy of neighbor labels with the true classes, L_ce-hat of Algorithm 1.

    The labels are probabilities already, averaged over samples of w, so their logarithm is taken directly.
    """
    picked = y_hat.gather(-1, y_true.unsqueeze(-1)).squeeze(-1)
    return -picked.clamp_min(torch.finfo(picked.dtype).tiny).log().mean()


def entropies(logits: Tensor) -> Tensor:
    """Return the entropy of every prediction (N,): H_i = -sum_c p[i, c] log p[i, c]."""
    log_p = F.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


def prediction_entropy(logits: Tensor) -> Tensor:
    """Return the mean entropy of the predictions, L_E of Eq. (1): what `soft` labels minimise."""
    return entropies(logits).mean()


def gaussian_kl(q: GaussianW, p: GaussianW, present: Tensor) -> Tensor:
    """Return KL[q || p] of Eq. (10), a mean over the features and over the classes that are present.

    Departs from the paper: a mean over d, not a sum, which would swamp every other term; and a class absent
    under either labeling has no row to compare.
    """
    variance_ratio = (q.std / p.std).square()
    shift = ((q.mean - p.mean) / p.std).square()
    per_class = 0.5 * (variance_ratio + shift - 1 - variance_ratio.log()).mean(-1)
    weight = present.to(per_class.dtype)
    return (per_class * weight).sum() / weight.sum().clamp_min(1)
