"""The bookkeeping of one layer's statistics: on a GPU one kernel in place of some twenty.

The formulas are those of `functional.normalization`. A layer has a few hundred channels, so that starting the
kernels takes all the time, and every layer has to wait for the one before it. torch compiles the kernels at
run time (NVRTC, no compiler needed on the machine); where they cannot be had the formulas run as written.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vicinal.functional.normalization import (
    MAX_STRETCH,
    SMALLEST_VARIANCE,
    Moments,
    mix,
    renormalization,
    transport,
)

THREADS = 128
SOURCE = """
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

extern "C" __global__ void take_in(
    const float* mean, const float* variance, const float* batch_mean, const float* batch_variance,
    const float* before_mean, const float* before_variance, const float* share, int follow, int channels,
    float* first_mean, float* first_variance, float* second_mean, float* second_variance) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    const Pair batch = {batch_mean[c], batch_variance[c]};
    Pair average = {mean[c], variance[c]};
    if (follow) average = carried(average, {before_mean[c], before_variance[c]}, batch);
    average = mixed(average, batch, *share);
    first_mean[c] = second_mean[c] = average.mean;
    first_variance[c] = second_variance[c] = average.variance;
}

extern "C" __global__ void renormalize(
    const float* mean, const float* variance, const float* batch_mean, const float* batch_variance,
    const float* share, double eps, int channels, float* r, float* d) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    const Pair batch = {batch_mean[c], batch_variance[c]};
    const Pair average = mixed({mean[c], variance[c]}, batch, *share);
    const float s = sqrtf(average.variance + (float)eps);
    r[c] = sqrtf(batch.variance + (float)eps) / s;
    d[c] = (batch.mean - average.mean) / s;
}
"""
Kernel = Callable[..., Any]


def take_in(
    average: Moments, batch: Moments, share: Tensor, before: Moments | None, out: tuple[Moments, Moments]
) -> None:
    """Write the average with the batch in it to both of `out`, carried along first if `before` is given."""
    values = (*average, *batch, *(before or batch), share)
    kernel = _kernel("take_in", *values, *out[0], *out[1])
    if kernel is not None:
        channels = len(average.mean)
        kernel(
            (-(-channels // THREADS), 1, 1),
            (THREADS, 1, 1),
            [*values, int(before is not None), channels, *out[0], *out[1]],
        )
        return
    if before is not None:
        average = transport(average, before, batch)
    average = mix(average, batch, share)
    for moments in out:
        moments.mean.copy_(average.mean)
        moments.variance.copy_(average.variance)


def renormalization_to(average: Moments, batch: Moments, share: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return r and d that turn a batch's own normalization into that by the average with the batch in it."""
    values = (*average, *batch, share)
    kernel = _kernel("renormalize", *values)
    if kernel is None:
        return renormalization(batch, mix(average, batch, share), eps)
    channels = len(average.mean)
    r, d = torch.empty_like(average.mean), torch.empty_like(average.mean)
    kernel((-(-channels // THREADS), 1, 1), (THREADS, 1, 1), [*values, float(eps), channels, r, d])
    return r, d


def _kernel(name: str, *values: Tensor) -> Kernel | None:
    """Return a kernel that can work on these tensors, or None."""
    first = values[0]
    plain = all(
        value.dtype == torch.float32 and value.device == first.device and value.is_contiguous()
        for value in values
    )
    return _kernels(first.device.index)[name] if plain and first.device.type == "cuda" else None


@cache
def _kernels(device: int) -> dict[str, Kernel | None]:
    """Return the compiled kernels of a device, each None where it cannot be compiled."""
    names = ("take_in", "renormalize")
    # Compiling is not yet a public call of torch: whatever keeps it from working, there is another way.
    try:
        with torch.cuda.device(device):
            return {name: torch.cuda._compile_kernel(source(), name) for name in names}
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError):
        return dict.fromkeys(names)


def source() -> str:
    """Return the text of the kernels with their constants."""
    constants = {"MAX_STRETCH": MAX_STRETCH, "SMALLEST_VARIANCE": SMALLEST_VARIANCE}
    return "".join(f"#define {name} {value}f\n" for name, value in constants.items()) + SOURCE
