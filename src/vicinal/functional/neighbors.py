"""Labels by the nearest neighbors: what a sample is, by what lies around it in the stream."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.types import Crowd


class Ballots(NamedTuple):
    """Whom every sample asks, and how much each of them counts."""

    weight: Tensor  # (N, k), of sum 1
    whom: Tensor  # (N, k), places of those asked among all
    any: Tensor  # (N, 1), whether there is anybody to ask


def neighbor_votes(z: Tensor, y: Tensor, crowd: Crowd, k: int, tau: float) -> Tensor:
    """Return the mean label (N, C) of every sample's nearest neighbors, the nearer the heavier.

    y_near_i = sum_j w_ij y_j, w_ij ~ exp(cos(z_i, z_j) / tau), j over the nearest in the rest of the batch
    and in the crowd: k of them, but no more than a class has there if all are equally frequent, since the
    next ones are others. A sample that has no neighbor keeps its own label.
    """
    unit = F.normalize(z, dim=-1)
    alone = torch.eye(len(z), dtype=torch.bool, device=z.device)
    near = torch.cat([unit @ unit.T, unit @ crowd.z.T], -1)
    nobody = torch.cat([alone, ~crowd.known.expand(len(z), -1)], -1)
    others = len(z) - 1 + crowd.known.sum()
    return _counted(_ballots(near, nobody, others, y.shape[-1], k, tau), torch.cat([y, crowd.y]), y)


def voted_labels(z: Tensor, y: Tensor, crowd: Crowd, k: int, tau: float, share: float, rounds: int) -> Tensor:
    """Return y_hat (N, C) by so many rounds of votes, in which neighbors are asked what theirs said.

    y_hat^(1) = (1 - share) y + share sum_j w_ij y_j for batch and crowd alike, w as in `neighbor_votes`, and
    y_hat^(t+1) the same with each y_j replaced by the square of y_hat_j^(t), normalized: what a round was
    sure of is surer in the next. Cosines of everybody with everybody: (N + M)^2 of them, M the crowd.
    """
    if rounds == 1:
        return torch.lerp(y, neighbor_votes(z, y, crowd, k, tau), share)
    unit, own = torch.cat([F.normalize(z, dim=-1), crowd.z]), torch.cat([y, crowd.y])
    alone = torch.eye(len(own), dtype=torch.bool, device=z.device)
    known = torch.cat([crowd.known.new_ones(len(z)), crowd.known])
    ballots = _ballots(unit @ unit.T, alone | ~known, known.sum() - 1, y.shape[-1], k, tau)
    y_hat = torch.lerp(own, _counted(ballots, own, own), share)
    for _ in range(rounds - 1):
        heard = F.normalize(y_hat.square(), p=1, dim=-1)
        y_hat = torch.lerp(own, _counted(ballots, heard, own), share)
    return y_hat[: len(z)]


def side_by_side(z: Tensor, z_source: Tensor) -> Tensor:
    """Return both features (..., 2 d), each at unit length: their cosine is the mean of both cosines."""
    return torch.cat([F.normalize(z, dim=-1), F.normalize(z_source, dim=-1)], -1)


def _ballots(near: Tensor, nobody: Tensor, others: Tensor, classes: int, k: int, tau: float) -> Ballots:
    """Return who is asked by cosines (N, M) with everybody, `nobody` being who may not."""
    similar, index = near.masked_fill(nobody, -torch.inf).topk(min(k, near.shape[-1]), -1)
    rank = torch.arange(similar.shape[-1], device=near.device)
    similar = similar.masked_fill(rank * classes >= others, -torch.inf)
    return Ballots((similar / tau).softmax(-1), index, similar[:, :1].isfinite())


def _counted(ballots: Ballots, y: Tensor, own: Tensor) -> Tensor:
    """Return what those asked say (N, C), y (M, C) being what each says; own labels where there is nobody."""
    votes = ballots.weight.unsqueeze(-1) * y[ballots.whom]
    return torch.where(ballots.any, votes.sum(-2), own)
