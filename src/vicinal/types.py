"""Values that travel between rooms: the latent classifier, the memory of a stream, who may be a neighbor."""

from typing import NamedTuple

from torch import Tensor


class GaussianW(NamedTuple):
    """The distribution of the latent classifier w: one diagonal Gaussian a class, and its bias.

    Shapes may carry leading dimensions (many groups or many steps at once). The bias is a point: the paper
    infers rows only and keeps the classifier's bias.
    """

    mean: Tensor  # (..., C, d)
    std: Tensor  # (..., C, d)
    bias: Tensor  # (..., C)


class Head(NamedTuple):
    """The linear classifier of a model: logits = z weight' + bias."""

    weight: Tensor  # (..., C, d)
    bias: Tensor  # (..., C)


class StreamMemory(NamedTuple):
    """What has been seen of a stream, class by class, older batches counting less."""

    sums: Tensor  # (..., C, d) features weighted by squared confidence
    counts: Tensor  # (..., C) those weights
    mass: Tensor  # (..., C) label mass; counts over mass is the mean confidence
    marginal: Tensor  # (..., C) running class marginal, sums to one
    squares: Tensor  # (..., C) squared norms of the features, weighted as they are


class Crowd(NamedTuple):
    """Samples of a stream among which later ones find their neighbors."""

    z: Tensor  # (M, d) features, of unit length
    y: Tensor  # (M, C) labels
    known: Tensor  # (M,) whether there is a sample, or only room for one
