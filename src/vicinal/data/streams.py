"""Streams: what arrives at test time, in order, inputs only."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vicinal.data.feeding import fetched_by, made_ahead, workers_for
from vicinal.data.pixels import Images, gather, joined
from vicinal.data.transforms import to_float
from vicinal.errors import ConfigError, DataError, UnknownNameError


@dataclass(frozen=True, eq=False)
class Stream:
    """Images in their order of arrival, batch by batch; the last batch may be short.

    `images` is uint8 (N, C, H, W); `order` holds positions in it. There are no labels here: they stay with
    whoever computes the metrics, as `labels[stream.order]`.
    """

    kind: str
    images: Images
    order: Tensor
    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"the batch size must be at least 1, not {self.batch_size}")

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def batches(self, device: torch.device | str) -> Iterator[Tensor]:
        """Yield float32 batches (B, C, H, W) in [0, 1] on the device."""

        def take(start: int) -> Tensor:
            chosen = self.order[start : start + self.batch_size]
            return gather([(self.images, chosen)], pinned=fetched_by(device))

        starts = range(0, len(self.order), self.batch_size)
        for images in made_ahead(starts, take, workers_for([self.images], device)):
            yield to_float(images, device)


@dataclass(frozen=True)
class StreamSpec:
    """Which stream to make: its kind, its batch size, and alpha of a drawn class marginal."""

    kind: str = "online"
    batch_size: int = 20
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in STREAMS:
            raise UnknownNameError("stream", self.kind, STREAMS)

    @property
    def joint(self) -> bool:
        """Whether it takes several domains together."""
        return self.kind in JOINT


def make_stream(spec: StreamSpec, images: Sequence[Images], labels: Sequence[Tensor], seed: int) -> Stream:
    """Return the stream of one domain's images, or of several domains' for a joint kind.

    Labels decide the order of a label-shifted or class-sorted one and go no further.
    """
    if len(images) != len(labels) or any(len(i) != len(y) for i, y in zip(images, labels, strict=False)):
        raise DataError("a stream needs one label for each image of each domain, for the metrics' sake")
    if not spec.joint and len(images) != 1:
        raise ConfigError(
            f"a stream of kind '{spec.kind}' is made of one domain: give one, not {len(images)}"
        )
    return Stream(spec.kind, joined(images), STREAMS[spec.kind](spec, labels, seed), spec.batch_size)


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


def class_sorted_order(labels: Tensor, seed: int) -> Tensor:
    """Return all positions class after class, the classes and the images of each in seeded random order."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    present = torch.from_numpy(np.unique(labels.cpu().numpy()))
    turn = torch.empty(int(present.max()) + 1 if len(present) else 0, dtype=torch.int64)
    turn[present[torch.randperm(len(present), generator=generator)]] = torch.arange(len(present))
    return shuffled[turn[labels.cpu()[shuffled]].argsort(stable=True)]


def continual_order(sizes: Sequence[int], seed: int) -> Tensor:
    """Return the positions of several domains, one domain after another, each in seeded random order."""
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    orders = [
        start + online_order(size, seed + k)
        for k, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    return torch.cat(orders)


Order = Callable[[StreamSpec, Sequence[Tensor], int], Tensor]

# Each takes the labels of every domain, in order, and returns positions in all of them joined.
STREAMS: Mapping[str, Order] = MappingProxyType(
    {
        "online": lambda spec, labels, seed: online_order(len(labels[0]), seed),
        "label_shift": lambda spec, labels, seed: label_shift_order(labels[0], spec.alpha, seed),
        "class_sorted": lambda spec, labels, seed: class_sorted_order(labels[0], seed),
        "continual": lambda spec, labels, seed: continual_order([len(y) for y in labels], seed),
        "mixed": lambda spec, labels, seed: online_order(sum(len(y) for y in labels), seed),
    }
)
JOINT = frozenset({"continual", "mixed"})
