"""Normalization statistics as arithmetic: batch, source, blend and stream moments of one layer."""

from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """First and second moment of every channel: E[x] and E[x^2]."""

    mean: Tensor
    second: Tensor

    @property
    def variance(self) -> Tensor:
        """The variance E[x^2] - E[x]^2, never below zero."""
        return (self.second - self.mean.square()).clamp_min(0)


def moments_from(mean: Tensor, variance: Tensor) -> Moments:
    """Return the moments of a layer that stores mean and variance."""
    return Moments(mean.clone(), variance + mean.square())


def mix(old: Moments, new: Moments, weight: float) -> Moments:
    """Return (1 - weight) old + weight new.

    Moments are mixed, not variances: the spread between batches then counts as spread, which is all there is
    when images come one at a time.
    """
    return Moments(
        old.mean + weight * (new.mean - old.mean), old.second + weight * (new.second - old.second)
    )


def stream_weight(images: int, seen: int, source_images: int, floor: float) -> float:
    """Return the weight of the newest batch in the stream average.

    max(n / (n_source + n_seen + n), 1 - (1 - floor)^(n / n_source)): the source statistics count as one batch
    of `source_images` images, then every image counts the same, and the newest `source_images` never count
    less than `floor`. At a batch size of `source_images` this is max(1 / (t + 1), floor) at step t.
    """
    return max(images / (source_images + seen + images), 1 - (1 - floor) ** (images / source_images))


def blend_weight(images: int, source_images: int) -> float:
    """Return the weight of a batch against source statistics that count as `source_images` images."""
    return images / (images + source_images)
