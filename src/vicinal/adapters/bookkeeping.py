"""The bookkeeping of one layer's statistics: on a GPU one kernel in place of some twenty.

The formulas are those of `functional.normalization`. A layer has a few hundred channels, so that starting the
kernels takes all the time, and every layer has to wait for the one before it. torch compiles the kernels at
run time with NVRTC; where they cannot be had the formulas run as written.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from vicinal.adapters.activations import Use
from vicinal.functional.normalization import (
    MAX_STRETCH,
    SMALLEST_VARIANCE,
    Moments,
    mix,
    renormalization,
    transport,
)
from vicinal.kernels import Kernel, compiled, constant, on, suited, with_constants

THREADS = 128
FORMULAS = """
struct Pair { float mean, variance; };

__device__ Pair mixed(Pair old, Pair batch, float share) {
    const float shift = batch.mean - old.mean;
    return {old.mean + share * shift,
            (1 - share) * old.variance + share * batch.variance + share * (1 - share) * shift * shift};
}

__device__ Pair carried(Pair average, Pair before, Pair after) {
    const float ratio = sqrtf((after.variance + SMALLEST_VARIANCE) / (before.variance + SMALLEST_VARIANCE));
    const float stretch = fminf(fmaxf(ratio, 1 / MAX_STRETCH), MAX_STRETCH);
    return {after.mean + stretch * (average.mean - before.mean), average.variance * stretch * stretch};
}
"""
KERNELS = """
extern "C" __global__ void average(
    const float* mean, const float* variance, const float* batch_mean, const float* batch_variance,
    const float* before_mean, const float* before_variance, const float* share, int follow, int channels,
    float* new_mean, float* new_variance) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    const Pair batch = {batch_mean[c], batch_variance[c]};
    Pair average = {mean[c], variance[c]};
    if (follow) average = carried(average, {before_mean[c], before_variance[c]}, batch);
    average = mixed(average, batch, *share);
    new_mean[c] = average.mean;
    new_variance[c] = average.variance;
}

extern "C" __global__ void renormalize(
    const float* mean, const float* variance, const float* batch_mean, const float* batch_variance,
    const float* share, const float* eps, int channels, float* r, float* d) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    const Pair batch = {batch_mean[c], batch_variance[c]};
    const Pair average = mixed({mean[c], variance[c]}, batch, *share);
    const float s = sqrtf(average.variance + *eps);
    r[c] = sqrtf(batch.variance + *eps) / s;
    d[c] = (batch.mean - average.mean) / s;
}
"""


class Uses:
    """What a pass has met: a layer may be used more than once in it."""

    def __init__(self) -> None:
        self.batch: dict[Use, Moments] = {}  # of what every use was fed
        # By layer, of its last use:
        self.used: dict[int, Moments] = {}  # what it ran on
        self.average: dict[int, Moments] = {}  # the stream's average
        self.home: dict[int, Moments] = {}  # the source's part, where classes are balanced

    def next(self, index: int) -> Use:
        """Return which use of a layer is the next one."""
        return index, sum(layer == index for layer, _ in self.batch)


def averaged(average: Moments, batch: Moments, share: Tensor, before: Moments | None = None) -> Moments:
    """Return the average with the batch in it: `mix`, after `transport` if the batch moved from `before`."""
    values = (*average, *batch, *(before or batch), share)
    kernel = _kernel("average", *values)
    if kernel is None:
        return mix(average if before is None else transport(average, before, batch), batch, share)
    new = Moments(*(torch.empty_like(value) for value in average))
    _launch(kernel, values, (int(before is not None), len(average.mean)), new)
    return new


def renormalization_to(average: Moments, batch: Moments, share: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return r and d that turn a batch's own normalization into that by the average with the batch in it.

    See `renormalization`.
    """
    values = (*average, *batch, share)
    kernel = _kernel("renormalize", *values)
    if kernel is None:
        return renormalization(batch, mix(average, batch, share), eps)
    r, d = torch.empty_like(average.mean), torch.empty_like(average.mean)
    _launch(kernel, (*values, constant(eps, share.device)), (len(average.mean),), (r, d))
    return r, d


def _launch(kernel: Kernel, values: Sequence[Tensor], numbers: Sequence[int], out: Sequence[Tensor]) -> None:
    blocks = -(-len(out[0]) // THREADS)
    with on(values[0].device):
        kernel((blocks, 1, 1), (THREADS, 1, 1), [*values, *numbers, *out])


def _kernel(name: str, *values: Tensor) -> Kernel | None:
    """Return a kernel that can work on these tensors, or None."""
    return _kernels(values[0].device.index).get(name) if suited(*values) else None


@cache
def _kernels(device: int) -> dict[str, Kernel]:
    """Return the kernels of a device by name; none where they cannot be compiled."""
    names = ("average", "renormalize")
    found = compiled(source(), names, device)
    return {} if found is None else dict(zip(names, found, strict=True))


def source(kernels: str = KERNELS) -> str:
    """Return the text of kernels after that of the formulas and their constants."""
    constants = {"MAX_STRETCH": f"{MAX_STRETCH}f", "SMALLEST_VARIANCE": f"{SMALLEST_VARIANCE}f"}
    return with_constants(FORMULAS + kernels, constants)
