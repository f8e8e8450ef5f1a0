"""Streams: what arrives at test time, in order, inputs only."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vicinal.data.transforms import to_float
from vicinal.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class Stream:
    """Images in their order of arrival, batch by batch; the last batch may be short.

    `images` is uint8 (N, C, H, W); `order` holds positions in it. There are no labels here: they stay with
    whoever computes the metrics, as `labels[stream.order]`.
    """

    kind: str
    images: Tensor
    order: Tensor
    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"the batch size must be at least 1, not {self.batch_size}")

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def batches(self, device: torch.device | str) -> Iterator[Tensor]:
        """Yield float32 batches (B, C, H, W) in [0, 1] on the device."""
        for start in range(0, len(self.order), self.batch_size):
            yield to_float(self.images[self.order[start : start + self.batch_size]], device)


def online_order(count: int, seed: int) -> Tensor:
    """Return a seeded permutation of `count` positions."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def label_shift_order(labels: Tensor, alpha: float, seed: int) -> Tensor:
    """Return positions whose class marginal follows a draw from Dirichlet(alpha), in seeded random order.

    Positions are drawn without replacement, as many as the marginal pi allows: floor(pi_c * M) of class c for
    the largest M with floor(pi_c * M) <= n_c for every class. The class that binds is used up.
    """
    if len(labels) == 0:
        raise DataError("a label-shifted stream needs at least one labelled image")
    present, counts = np.unique(labels.cpu().numpy(), return_counts=True)
    rng = np.random.default_rng(seed)
    wanted = _drawn_counts(draw_marginal(len(present), alpha, rng), counts)
    members = (np.flatnonzero(labels.cpu().numpy() == label) for label in present)
    chosen = [rng.permutation(own)[:count] for own, count in zip(members, wanted, strict=True)]
    return torch.from_numpy(rng.permutation(np.concatenate(chosen)))


def draw_marginal(classes: int, alpha: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return one draw from the symmetric Dirichlet(alpha): shares of the classes, summing to 1."""
    if not alpha > 0:
        raise ConfigError(f"alpha of a label-shifted stream must be above 0, not {alpha}")
    return rng.dirichlet(np.full(classes, float(alpha)))


def _drawn_counts(marginal: NDArray[np.float64], available: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return floor(pi_c * M) for the largest M that asks no class for more images than it has."""
    # The counts sum to more than M - C, so no M past N + C can be served and the search is bounded.
    totals = range(int(available.sum()) + len(available) + 1)
    refused = bisect_left(totals, True, key=lambda m: bool((np.floor(marginal * m) > available).any()))
    counts: NDArray[np.int64] = np.floor(marginal * (refused - 1)).astype(np.int64)
    return counts
