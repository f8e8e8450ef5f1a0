"""Maths of the methods that predict from supports: selection, prototypes, neighbors, smoothed assignments."""

import torch
from torch import Tensor
from torch.nn import functional as F

CHECK_EVERY = 5  # iterations between two questions to the host whether assignments have converged


def lowest_entropy(labels: Tensor, entropy: Tensor, per_class: int) -> Tensor:
    """Return the positions, in order, of the `per_class` supports of lowest entropy of each class.

    With -1 all are kept. Of two with the same entropy the older one is.
    """
    if per_class == -1:
        return torch.arange(len(labels), device=labels.device)
    order = entropy.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]  # by class, inside a class by entropy
    by_class = labels[order]
    rank = torch.arange(len(order), device=order.device) - torch.searchsorted(by_class, by_class)
    return order[rank < per_class].sort().values


def prototype_logits(z: Tensor, supports: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Return scale * cos(z, c_k) (..., N, C), c_k the mean of the supports (..., M, d) with label k.

    Labels are one-hot (M, C). A class without supports has no direction: its cosine counts as -1, the lowest
    there is, so that it cannot be predicted.
    """
    shares = labels / labels.sum(0).clamp_min(1)
    centroids = shares.T @ supports
    cosines = F.normalize(z, dim=-1) @ F.normalize(centroids, dim=-1).transpose(-1, -2)
    present = (centroids != 0).any(-1).unsqueeze(-2)
    return scale * torch.where(present, cosines, -torch.ones_like(cosines))


def nearest_supports(z: Tensor, supports: Tensor, neighbors: int) -> tuple[Tensor, Tensor]:
    """Return the cosines (N, k) of the supports nearest to each feature, nearest first, and their positions.

    k is `neighbors`, or the number of supports where they are fewer.
    """
    cosines = F.normalize(z, dim=-1) @ F.normalize(supports, dim=-1).T
    nearest = cosines.topk(min(neighbors, len(supports)), dim=-1)
    return nearest.values, nearest.indices


def knn_affinity(z: Tensor, neighbors: int) -> Tensor:
    """Return W (N, N): 1 where the second image is among the nearest `neighbors` of the first, else 0.

    Distances are between normalised features; no image is its own neighbor.
    """
    affinity, others = z.new_zeros(len(z), len(z)), min(neighbors, len(z) - 1)
    if others == 0:
        return affinity
    return affinity.scatter_(
        -1, _distances(z).fill_diagonal_(torch.inf).topk(others, largest=False).indices, 1
    )


def rbf_affinity(z: Tensor, neighbors: int) -> Tensor:
    """Return W (N, N): exp(-d^2 / (2 s^2)), s the mean distance to the `neighbors`-th nearest.

    An image counts as its own nearest. Where all are the same one, s is 0 and every affinity 1.
    """
    distances = _distances(z)
    width = distances.kthvalue(min(neighbors, len(z)), dim=-1).values.mean()
    return torch.exp(-distances.square() / (2 * width.square()).clamp_min(torch.finfo(z.dtype).eps))


def linear_affinity(z: Tensor, neighbors: int) -> Tensor:
    """Return W (N, N): cosines; `neighbors` has no part in it."""
    unit = F.normalize(z, dim=-1)
    return unit @ unit.T


def _distances(z: Tensor) -> Tensor:
    unit = F.normalize(z, dim=-1)
    # By differences: the expanded square loses half the digits just where neighbors are close.
    return torch.cdist(unit, unit, compute_mode="donot_use_mm_for_euclid_dist")


def smoothed_assignments(log_p: Tensor, affinity: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Return log y (N, C) of y <- softmax(log p + W y), iterated from y = p until its energy stands still.

    Each iteration minimises a bound on E(y) = sum_i KL(y_i || p_i) - sum_ij w_ij y_i' y_j. It stands still
    when it changes by no more than `tolerance` of itself, not before the third iteration.
    """
    log_y, energy = log_p, log_p.new_tensor(torch.inf)
    done = torch.zeros((), dtype=torch.bool, device=log_p.device)
    for iteration in range(iterations):
        pairwise = affinity @ log_y.exp()
        new = F.log_softmax(log_p + pairwise, dim=-1)
        y = new.exp()
        new_energy = (y * (new - log_p - pairwise)).sum()
        log_y = torch.where(done, log_y, new)
        if iteration > 1:
            done = done | ((new_energy - energy).abs() <= tolerance * energy.abs())
        energy = new_energy
        # Asked rarely: each answer waits for the device, and what is done no longer moves.
        if iteration % CHECK_EVERY == CHECK_EVERY - 1 and bool(done):
            break
    return log_y
