"""The memory of a stream and the evidence read off it: what the out-of-fold phi looks at."""

from typing import NamedTuple

import torch
from torch import Tensor

from vicinal.types import Head, StreamMemory

# Relative to the mean feature: below it a centred class mean is rounding error.
ROUNDING = 1e-4
RARE = 1e-3  # a count below which a class has no spread to speak of
NUMBERS = (
    "log_count",
    "cosine",
    "confidence",
    "mean_norm",
    "row_norm",
    "log_marginal",
    "log_spread",
    "log_share",
)
EVIDENCE = (*NUMBERS, *(f"mean_{name}" for name in NUMBERS))


def empty_memory(head: Head) -> StreamMemory:
    """Return the memory before the first batch: no features, a uniform marginal."""
    # Tensors of their own, not one thrice: whoever keeps them writes into them.
    counts, mass, squares = (torch.zeros_like(head.bias) for _ in range(3))
    uniform = torch.full_like(head.bias, 1 / head.bias.shape[-1])
    return StreamMemory(torch.zeros_like(head.weight), counts, mass, uniform, squares)


def batch_memory(z: Tensor, y: Tensor) -> StreamMemory:
    """Return what one batch adds: features weighted by squared confidence, label mass, class shares."""
    weights, mass = y.square(), y.sum(-2)
    turned = weights.transpose(-1, -2)
    squares = (turned @ z.square().sum(-1, keepdim=True)).squeeze(-1)
    return StreamMemory(turned @ z, weights.sum(-2), mass, mass / y.shape[-2], squares)


def remember(memory: StreamMemory, new: StreamMemory, decay: float) -> StreamMemory:
    """Return decay * memory + new; the marginal stays normalised: decay * old + (1 - decay) * new."""
    return StreamMemory(
        torch.add(new.sums, memory.sums, alpha=decay),
        torch.add(new.counts, memory.counts, alpha=decay),
        torch.add(new.mass, memory.mass, alpha=decay),
        torch.lerp(new.marginal, memory.marginal, decay),
        torch.add(new.squares, memory.squares, alpha=decay),
    )


class Centres(NamedTuple):
    """Where the classes of a stream lie: read off a memory once, used by all that asks for it."""

    counts: Tensor  # (..., C) of the memory, above zero
    summed: Tensor  # (..., 1) all counts together, above zero
    means: Tensor  # (..., C, d) of the classes
    total: Tensor  # (..., 1, d) of the stream
    centred: Tensor  # (..., C, d) means less total; zero for a class that has no direction
    norms: Tensor  # (..., C) of centred
    middle: Tensor  # (..., 1) norm of total


def centres(memory: StreamMemory) -> Centres:
    """Return the class means of the stream, and these less the stream's mean."""
    tiny = torch.finfo(memory.counts.dtype).tiny
    counts = memory.counts.clamp_min(tiny)
    summed = memory.counts.sum(-1, keepdim=True).clamp_min(tiny)
    total = memory.sums.sum(-2, keepdim=True) / summed.unsqueeze(-1)
    means = memory.sums / counts.unsqueeze(-1)
    centred, middle = means - total, total.norm(dim=-1)
    norms = centred.norm(dim=-1)
    # One image, or one class, has no direction: what is left of its mean is rounding error, not evidence.
    real = (norms > ROUNDING * middle) & (memory.counts > 0)
    return Centres(counts, summed, means, total, centred * real.unsqueeze(-1), norms * real, middle)


class Rows(NamedTuple):
    """The source classifier as phi sees it."""

    centred: Tensor  # (..., C, d) rows less their mean
    norms: Tensor  # (..., C) of those
    size: Tensor  # (...) average norm of the rows as they are


def source_rows(head: Head) -> Rows:
    """Return the rows of a classifier less their mean, and how long they are."""
    centred = head.weight - head.weight.mean(-2, keepdim=True)
    return Rows(centred, centred.norm(dim=-1), head.weight.norm(dim=-1).mean(-1))


def evidence(memory: StreamMemory, at: Centres, rows: Rows) -> Tensor:
    """Return the numbers of every class (..., C, 16), in the order of EVIDENCE, free of the features' scale.

    Log count in the memory; cosine between centred class mean and centred source row; mean confidence; norm
    of the mean and norm of the row, each over its average; log of the running marginal times C; log of the
    spread around the mean over the spread of all; log of the share of the count times C. Then the mean of
    each over the classes. How tight a class is tells one that is frequent from one that swallows others.
    """
    tiny, classes = 1e-6, memory.counts.shape[-1]
    lengths = at.norms.clamp_min(tiny) * rows.norms.clamp_min(tiny)
    numbers = (
        memory.counts.add(tiny).log().clamp_min(-5),
        (at.centred * rows.centred).sum(-1) / lengths,
        memory.counts / memory.mass.clamp_min(tiny),
        over_average(at.norms),
        over_average(rows.norms).expand_as(memory.counts),
        (memory.marginal * classes).add(1e-3).log(),
        relative_spread(memory, at).add(1e-2).log(),
        (memory.counts * classes / at.summed.clamp_min(tiny)).add(1e-3).log(),
    )
    own = torch.stack(numbers, -1)
    return torch.cat([own, own.mean(-2, keepdim=True).expand_as(own)], -1)


def relative_spread(memory: StreamMemory, at: Centres) -> Tensor:
    """Return the mean squared distance from the class mean over that from the stream's mean (..., C).

    One for a class that is hardly there.
    """
    within = memory.squares / at.counts - at.means.square().sum(-1)
    whole = memory.squares.sum(-1, keepdim=True) / at.summed
    # Relative to the features themselves: less is rounding error.
    overall = torch.maximum(whole - at.middle.square(), ROUNDING * whole)
    spread = within.clamp_min(0) / overall.clamp_min(torch.finfo(within.dtype).tiny)
    return torch.where(memory.counts > RARE, spread, 1.0)


def over_average(norms: Tensor) -> Tensor:
    """Return every class's norm over their average (..., C)."""
    return norms / norms.mean(-1, keepdim=True).clamp_min(1e-6)
