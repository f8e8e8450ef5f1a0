"""The memory of a stream and the evidence read off it: what the out-of-fold phi looks at."""

import torch
from torch import Tensor
from torch.nn import functional as F

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
    weights = y.square()
    squares = (weights * z.square().sum(-1, keepdim=True)).sum(-2)
    return StreamMemory(weights.transpose(-1, -2) @ z, weights.sum(-2), y.sum(-2), y.mean(-2), squares)


def remember(memory: StreamMemory, new: StreamMemory, decay: float) -> StreamMemory:
    """Return decay * memory + new; the marginal stays normalised: decay * old + (1 - decay) * new."""
    return StreamMemory(
        decay * memory.sums + new.sums,
        decay * memory.counts + new.counts,
        decay * memory.mass + new.mass,
        decay * memory.marginal + (1 - decay) * new.marginal,
        decay * memory.squares + new.squares,
    )


def centred_means(memory: StreamMemory) -> tuple[Tensor, Tensor]:
    """Return the class means of the stream less the stream's mean (..., C, d), and that mean (..., 1, d)."""
    tiny = torch.finfo(memory.counts.dtype).tiny
    total = memory.sums.sum(-2, keepdim=True) / memory.counts.sum(-1).clamp_min(tiny)[..., None, None]
    means = memory.sums / memory.counts.clamp_min(tiny).unsqueeze(-1)
    centred = means - total
    # One image, or one class, has no direction: what is left of its mean is rounding error, not evidence.
    real = centred.norm(dim=-1, keepdim=True) > ROUNDING * total.norm(dim=-1, keepdim=True)
    return torch.where(real & (memory.counts.unsqueeze(-1) > 0), centred, torch.zeros_like(means)), total


def evidence(memory: StreamMemory, head: Head) -> Tensor:
    """Return the numbers of every class (..., C, 16), in the order of EVIDENCE, free of the features' scale.

    Log count in the memory; cosine between centred class mean and centred source row; mean confidence; norm
    of the mean and norm of the row, each over its average; log of the running marginal times C; log of the
    spread around the mean over the spread of all; log of the share of the count times C. Then the mean of
    each over the classes. How tight a class is tells one that is frequent from one that swallows others.
    """
    centred, _ = centred_means(memory)
    rows = head.weight - head.weight.mean(-2, keepdim=True)
    tiny = 1e-6
    numbers = (
        memory.counts.add(tiny).log().clamp_min(-5),
        F.cosine_similarity(centred, rows.expand_as(centred), dim=-1, eps=tiny),
        memory.counts / memory.mass.clamp_min(tiny),
        relative_norm(centred),
        relative_norm(rows).expand_as(memory.counts),
        (memory.marginal * memory.marginal.shape[-1]).add(1e-3).log(),
        relative_spread(memory).add(1e-2).log(),
        (memory.counts * memory.counts.shape[-1] / memory.counts.sum(-1, keepdim=True).clamp_min(tiny))
        .add(1e-3)
        .log(),
    )
    own = torch.stack(numbers, -1)
    return torch.cat([own, own.mean(-2, keepdim=True).expand_as(own)], -1)


def relative_spread(memory: StreamMemory) -> Tensor:
    """Return the mean squared distance from the class mean over that from the stream's mean (..., C).

    One for a class that is hardly there.
    """
    tiny = torch.finfo(memory.counts.dtype).tiny
    counts = memory.counts.clamp_min(tiny)
    within = memory.squares / counts - (memory.sums / counts.unsqueeze(-1)).square().sum(-1)
    count = memory.counts.sum(-1, keepdim=True).clamp_min(tiny)
    middle = (memory.sums.sum(-2) / count).square().sum(-1, keepdim=True)
    whole = memory.squares.sum(-1, keepdim=True) / count
    # Relative to the features themselves: less is rounding error.
    overall = (whole - middle).clamp_min(ROUNDING * whole).clamp_min(tiny)
    return torch.where(memory.counts > RARE, within.clamp_min(0) / overall, torch.ones_like(within))


def relative_norm(rows: Tensor) -> Tensor:
    """Return the norm of every row over the average norm (..., C)."""
    norms = rows.norm(dim=-1)
    relative: Tensor = norms / norms.mean(-1, keepdim=True).clamp_min(1e-6)
    return relative
