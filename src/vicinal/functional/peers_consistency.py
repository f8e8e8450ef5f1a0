"""Losses of the methods that compare views: marginal entropy, contrast, moments, and RoTTA's weights."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class FeatureMoments(NamedTuple):
    """Mean (d,) and covariance (d, d) of features."""

    mean: Tensor
    covariance: Tensor


def marginal_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the mean prediction over views (B, C): H(mean_b p_b), the loss of MEMO."""
    log_p = F.log_softmax(logits, dim=-1).logsumexp(0) - math.log(len(logits))
    return -(log_p.exp() * log_p).sum()


def contrastive_loss(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Return the NT-Xent loss of two views (N, k) of the same images, a mean over all 2N of them.

    -log [exp(s(i, i') / t) / sum over j != i of exp(s(i, j) / t)], s the cosine, i' the other view of i.
    """
    unit = F.normalize(torch.cat([first, second]), dim=-1)
    itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    similar = (unit @ unit.T / temperature).masked_fill(itself, -math.inf)
    partner = torch.arange(len(unit), device=unit.device).roll(len(first))
    return F.cross_entropy(similar, partner)


def feature_moments(z: Tensor) -> FeatureMoments:
    """Return the moments of features (N, d); a lone one has a covariance of zero."""
    mean = z.mean(0)
    centred = z - mean
    return FeatureMoments(mean, centred.T @ centred / max(len(z) - 1, 1))


def moment_distances(one: FeatureMoments, other: FeatureMoments) -> Tensor:
    """Return how far two means and two covariances are apart (2,), as the code of TTT++ scales them.

    |m - m'|^2 / d and |S - S'|_F^2 / (4 d^2).
    """
    means = (one.mean - other.mean).square().mean()
    return torch.stack([means, (one.covariance - other.covariance).square().mean() / 4])


def quarter_turns(x: Tensor, turns: Tensor) -> Tensor:
    """Return square images (N, C, S, S), each rotated counter-clockwise by its own number of turns (N,)."""
    every = torch.stack([torch.rot90(x, count, (-2, -1)) for count in range(4)])
    return every[turns, torch.arange(len(x), device=x.device)]


def timeliness(age: Tensor) -> Tensor:
    """Return the weight of samples of an age in units of the memory's size: 1 / (1 + e^age), RoTTA."""
    return torch.sigmoid(-age)
