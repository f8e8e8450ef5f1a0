"""Normalization statistics as arithmetic: how batch, source and stream moments of one layer combine."""

from typing import NamedTuple

import torch
from torch import Tensor

# How much one update may stretch a channel: beyond it the batch, not the update, is what changed.
MAX_STRETCH = 2.0
SMALLEST_VARIANCE = 1e-8  # of a channel that is to be divided by


class Moments(NamedTuple):
    """Mean and (population) variance of every channel of a layer's input."""

    mean: Tensor
    variance: Tensor


def moments_of(x: Tensor, *, constant: bool = True) -> Moments:
    """Return the moments of every channel of x (N, C, ...) over samples and places.

    They are constants to the gradient unless it is said that they are not.
    """
    x = x.detach() if constant else x
    if not (constant and x.device.type == "cuda"):  # there halves are summed in single precision anyway
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    if constant and x.device.type in ("cpu", "cuda"):
        # What batch normalization itself computes, three times faster than `var_mean` on a CPU.
        return Moments(*torch.batch_norm_update_stats(x, None, None, 0.0))
    variance, mean = torch.var_mean(x, dim=[dim for dim in range(x.ndim) if dim != 1], correction=0)
    return Moments(mean, variance)


def weighted_moments(x: Tensor, weight: Tensor) -> Moments:
    """Return the moments of every channel of x (N, C, ...), each image counting as its weight (N,) says.

    m = sum_i w_i m_i / sum_i w_i and v = sum_i w_i (v_i + (m_i - m)^2) / sum_i w_i by the moments of every
    image alone. They are constants to the gradient.
    """
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32)).unsqueeze(-1)
    variance, mean = torch.var_mean(x.flatten(2), dim=-1, correction=0)
    w = (weight / weight.sum()).to(x.dtype).unsqueeze(-1)
    middle = (w * mean).sum(0)
    return Moments(middle, (w * (variance + (mean - middle).square())).sum(0))


def mix(old: Moments, new: Moments, weight: float | Tensor) -> Moments:
    """Return the moments of a mixture that takes `weight` of its samples from `new` and the rest from `old`.

    The distance between the means counts as spread: it is all the spread there is between images that come
    one at a time.
    """
    shift = new.mean - old.mean
    variance = (1 - weight) * old.variance + weight * new.variance + weight * (1 - weight) * shift.square()
    return Moments(old.mean + weight * shift, variance)


def renormalization(batch: Moments, target: Moments, eps: float) -> tuple[Tensor, Tensor]:
    """Return r and d with (x - m) / s = r (x - m_b) / s_b + d: r = s_b / s, d = (m_b - m) / s."""
    s_b, s = (batch.variance + eps).sqrt(), (target.variance + eps).sqrt()
    return s_b / s, (batch.mean - target.mean) / s


def moment_shift(source: Moments, batch: Moments) -> Tensor:
    """Return how far a batch's moments are from the source's, in standard deviations of the source.

    mean_c |m_c - m_s,c| / s_c + |log(v_c / v_s,c)| / 2: zero when they are the same, one for a shift by one
    standard deviation or a stretch by e.
    """
    tiny = 1e-5
    moved = (batch.mean - source.mean).abs() / (source.variance + tiny).sqrt()
    stretched = ((batch.variance + tiny) / (source.variance + tiny)).log().abs() / 2
    return (moved + stretched).mean()


def transport(moments: Moments, before: Moments, after: Moments) -> Moments:
    """Return `moments` carried along when an update moves a batch's own moments from `before` to `after`.

    The update is taken for an affine map of each channel, x' = a x + b, a = sqrt(v_after / v_before),
    b = m_after - a m_before: statistics gathered under the old weights then hold under the new ones.
    """
    ratio = ((after.variance + SMALLEST_VARIANCE) / (before.variance + SMALLEST_VARIANCE)).sqrt()
    stretch = ratio.clamp(1 / MAX_STRETCH, MAX_STRETCH)
    mean = after.mean + stretch * (moments.mean - before.mean)
    return Moments(mean, moments.variance * stretch.square())


def stream_weight(images: int | Tensor, seen: Tensor, source_images: int, floor: float) -> Tensor:
    """Return the weight of the newest batch in the stream average, where the count of images `seen` lives.

    max(n / (n_source + n_seen + n), 1 - (1 - floor)^(n / n_source)): the source statistics count as one batch
    of `source_images` images, then every image counts the same, and the newest `source_images` never count
    less than `floor`. At a batch size of `source_images` this is max(1 / (t + 1), floor) at step t.
    """
    least: float | Tensor = 1 - (1 - floor) ** (images / source_images)
    return (images / (source_images + seen.double() + images)).clamp_min(least)


def blend_weight(images: int, source_images: int) -> float:
    """Return the weight of a batch against source statistics that count as `source_images` images."""
    return images / (images + source_images)
