"""Labels by the nearest neighbors: what a sample is, by what lies around it in the stream."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.types import Crowd


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
    similar, index = near.masked_fill(nobody, -torch.inf).topk(min(k, near.shape[-1]), -1)
    others = len(z) - 1 + crowd.known.sum()
    rank = torch.arange(similar.shape[-1], device=z.device)
    similar = similar.masked_fill(rank * y.shape[-1] >= others, -torch.inf)
    votes = (similar / tau).softmax(-1).unsqueeze(-1) * torch.cat([y, crowd.y])[index]
    return torch.where(similar[:, :1].isfinite(), votes.sum(-2), y)
