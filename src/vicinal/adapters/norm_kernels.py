"""The kernels of a BatchNorm layer on an average that takes its batch in: two forward and two backward.

The first of each two adds up parts of the batch, the second puts the parts together, does what follows from
them for every channel, and writes the rows. The blocks that share a channel each put its parts together, in
the same order: none waits for another, nothing is kept between two starts, and the same batch gives the same
bits. torch compiles the kernels at run time with NVRTC.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vicinal.adapters import bookkeeping
from vicinal.functional.normalization import Moments
from vicinal.kernels import Kernel, compiled, constant, on, with_constants

THREADS = 512  # of a block
LANES = 32  # channels of a block, neighbors in memory; both are powers of two
AHEAD = 8  # rows that a thread asks the memory for at once
BLOCKS = 2  # for every processor of the device
LEAST_ROWS = 64  # that are worth a block
MOST_VALUES = 2**30  # whose places the kernels can count
Kernels = dict[str, Kernel]  # by name
NAMES = ("norm_parts", "norm_forward", "norm_sums", "norm_backward")
KERNELS = """
#define ROWS (THREADS / LANES)

struct Part { float count, mean, square; };  // of some values of a channel; the square around their mean
struct Sums { float dy, product; };  // over some rows of a channel: of dy, and of dy times the centred x
struct Span { int channel, first, end; };  // of a thread: every ROWS-th row; none where there is no channel
struct Some { float of[AHEAD]; };  // values of a thread's next rows

__device__ Span span_of(int rows, int channels, int chunk) {
    const int t = threadIdx.x, tile = blockIdx.x, start = (int)blockIdx.y * chunk;
    const int channel = tile * LANES + t % LANES, end = start + chunk < rows ? start + chunk : rows;
    return {channel, start + t / LANES, channel < channels ? end : 0};
}

// The same thread's share of what the blocks have left of its channel.
__device__ Span pieces_of(Span span, int channels, int blocks) {
    return {span.channel, (int)threadIdx.x / LANES, span.channel < channels ? blocks : 0};
}

// All are read before the first of them is used: one by one each would wait for the memory.
__device__ Some next(const float* __restrict__ x, Span span, int row, int channels, float beyond) {
    Some values;
    #pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
        const int at = row + k * ROWS;
        values.of[k] = at < span.end ? x[at * channels + span.channel] : beyond;
    }
    return values;
}

__device__ Part together(Part a, Part b) {
    if (b.count == 0) return a;
    if (a.count == 0) return b;
    const float count = a.count + b.count, share = b.count / count, gap = b.mean - a.mean;
    return {count, a.mean + share * gap, a.square + b.square + share * a.count * gap * gap};
}

__device__ Sums together(Sums a, Sums b) { return {a.dy + b.dy, a.product + b.product}; }

// The same operations on the way back as forward: what was cut off there has no slope here.
__device__ float put_out(float x, float scale, float mean, float shift) {
    return fmaf(scale, x - mean, shift);
}

__device__ float passed(float dy, float x, float scale, float mean, float shift, int rectified) {
    return rectified && put_out(x, scale, mean, shift) <= 0 ? 0 : dy;
}

// What the threads of a channel have together. Every thread of the block comes here, once.
template <class T> __device__ T of_block(T mine) {
    __shared__ T all[THREADS];
    const int t = threadIdx.x;
    all[t] = mine;
    for (int half = THREADS / 2; half >= LANES; half /= 2) {
        __syncthreads();
        if (t < half) all[t] = together(all[t], all[t + half]);
    }
    __syncthreads();
    return all[t % LANES];
}

extern "C" __global__ void __launch_bounds__(THREADS) norm_parts(
    const float* __restrict__ x, int rows, int channels, int chunk, int blocks, float* parts) {
    const Span span = span_of(rows, channels, chunk);
    const int c = span.channel;
    Part mine = {0, 0, 0};
    if (span.first < span.end) {
        // Around one of the values: squares of large ones would leave nothing of the variance.
        const float origin = x[span.first * channels + c];
        float sum = 0, square = 0;
        for (int row = span.first; row < span.end; row += AHEAD * ROWS) {
            const Some values = next(x, span, row, channels, origin);
            #pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                const float value = values.of[k] - origin;
                sum += value;
                square += value * value;
            }
        }
        const float count = (span.end - span.first + ROWS - 1) / ROWS, around = square - sum * sum / count;
        mine = {count, origin + sum / count, around < 0 ? 0 : around};
    }
    mine = of_block(mine);
    if (threadIdx.x >= LANES || c >= channels) return;
    const int at = (int)blockIdx.y * channels + c;
    parts[at] = mine.mean;
    parts[blocks * channels + at] = mine.square;
}

extern "C" __global__ void __launch_bounds__(THREADS) norm_forward(
    const float* __restrict__ x, const float* weight, const float* bias, const float* mean,
    const float* variance, const float* before_mean, const float* before_variance, const float* share,
    const float* eps, const float* __restrict__ parts, int follow, int rectify, int rows, int channels,
    int chunk, int blocks, float* batch_mean, float* batch_variance, float* new_mean, float* new_variance,
    float* __restrict__ y) {
    const Span span = span_of(rows, channels, chunk), pieces = pieces_of(span, channels, blocks);
    const int c = span.channel, safe = c < channels ? c : 0;
    // Asked for early, since nothing of what follows can hide the wait.
    Pair average = {mean[safe], variance[safe]};
    const Pair before = {before_mean[safe], before_variance[safe]};
    const float w = weight[safe], shift = bias[safe], weighs = *share, least = *eps;
    Part whole = {0, 0, 0};
    for (int block = pieces.first; block < pieces.end; block += AHEAD * ROWS) {
        const Some means = next(parts, pieces, block, channels, 0);
        const Some squares = next(parts + blocks * channels, pieces, block, channels, 0);
        #pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const int piece = block + k * ROWS, left = piece < pieces.end ? rows - piece * chunk : 0;
            const float count = left < chunk ? left : chunk;
            whole = together(whole, Part{count, means.of[k], squares.of[k]});
        }
    }
    whole = of_block(whole);
    if (c >= channels) return;

    const Pair batch = {whole.mean, whole.square / rows};
    if (follow) average = carried(average, before, batch);
    average = mixed(average, batch, weighs);
    if (blockIdx.y == 0 && threadIdx.x < LANES) {
        batch_mean[c] = batch.mean;
        batch_variance[c] = batch.variance;
        new_mean[c] = average.mean;
        new_variance[c] = average.variance;
    }
    const float scale = w / sqrtf(average.variance + least);
    for (int row = span.first; row < span.end; row += AHEAD * ROWS) {
        const Some values = next(x, span, row, channels, 0);
        #pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            float value = put_out(values.of[k], scale, average.mean, shift);
            if (rectify && value < 0) value = 0;  // NaN stays
            if (row + k * ROWS < span.end) y[(row + k * ROWS) * channels + c] = value;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) norm_sums(
    const float* __restrict__ x, const float* __restrict__ dy, const float* weight, const float* bias,
    const float* batch_mean, const float* mean, const float* variance, const float* eps, int rectified,
    int rows, int channels, int chunk, int blocks, float* parts) {
    const Span span = span_of(rows, channels, chunk);
    const int c = span.channel, safe = c < channels ? c : 0;
    const float m_b = batch_mean[safe], m = mean[safe], shift = bias[safe];
    const float scale = weight[safe] / sqrtf(variance[safe] + *eps);
    Sums mine = {0, 0};
    for (int row = span.first; row < span.end; row += AHEAD * ROWS) {
        const Some slopes = next(dy, span, row, channels, 0), values = next(x, span, row, channels, m_b);
        #pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const float slope = passed(slopes.of[k], values.of[k], scale, m, shift, rectified);
            mine.dy += slope;
            mine.product += slope * (values.of[k] - m_b);
        }
    }
    mine = of_block(mine);
    if (threadIdx.x >= LANES || c >= channels) return;
    const int at = (int)blockIdx.y * channels + c;
    parts[at] = mine.dy;
    parts[blocks * channels + at] = mine.product;
}

// y = w (r x_b + d) + b with x_b = (x - m_b) / s_b and constants r = s_b / s, d = (m_b - m) / s.
extern "C" __global__ void __launch_bounds__(THREADS) norm_backward(
    const float* __restrict__ x, const float* __restrict__ dy, const float* weight, const float* bias,
    const float* batch_mean, const float* batch_variance, const float* mean, const float* variance,
    const float* eps, const float* __restrict__ parts, int wanted, int rectified, int rows, int channels,
    int chunk, int blocks, float* d_weight, float* d_bias, float* __restrict__ dx) {
    const Span span = span_of(rows, channels, chunk), pieces = pieces_of(span, channels, blocks);
    const int c = span.channel, safe = c < channels ? c : 0;
    const float m_b = batch_mean[safe], v_b = batch_variance[safe], m = mean[safe], v = variance[safe];
    const float w = weight[safe], shift = bias[safe], least = *eps;
    Sums whole = {0, 0};
    for (int block = pieces.first; block < pieces.end; block += AHEAD * ROWS) {
        const Some slopes = next(parts, pieces, block, channels, 0);
        const Some products = next(parts + blocks * channels, pieces, block, channels, 0);
        #pragma unroll
        for (int k = 0; k < AHEAD; ++k) whole = together(whole, Sums{slopes.of[k], products.of[k]});
    }
    whole = of_block(whole);
    if (c >= channels) return;

    const float s_b = sqrtf(v_b + least), s = sqrtf(v + least);
    const float r = s_b / s, d = (m_b - m) / s, product = whole.product / s_b;
    if (blockIdx.y == 0 && threadIdx.x < LANES) {
        d_weight[c] = r * product + d * whole.dy;
        d_bias[c] = whole.dy;
    }
    if (!wanted) return;
    const float of_dy = w / s;  // the scale as well
    const float of_x = -of_dy * product / (s_b * rows), rest = -of_dy * whole.dy / rows;
    for (int row = span.first; row < span.end; row += AHEAD * ROWS) {
        const Some slopes = next(dy, span, row, channels, 0), values = next(x, span, row, channels, 0);
        #pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const float dy_k = passed(slopes.of[k], values.of[k], of_dy, m, shift, rectified);
            const float slope = of_dy * dy_k + of_x * (values.of[k] - m_b) + rest;
            if (row + k * ROWS < span.end) dx[(row + k * ROWS) * channels + c] = slope;
        }
    }
}
"""


class Given(NamedTuple):
    """What a layer normalizes with: its own tensors, the average, and what a batch weighs in that."""

    weight: Tensor
    bias: Tensor
    eps: float
    average: Moments
    share: Tensor
    before: Moments | None = None  # the batch's moments before an update moved them
    rectify: bool = False  # put out max(y, 0)


class Done(NamedTuple):
    """What a layer has put out, of what batch, on what average."""

    y: Tensor
    batch: Moments
    average: Moments


class Held(NamedTuple):
    """What the gradient needs of the way forward."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    batch: Moments
    average: Moments
    rectified: bool = False


class Slopes(NamedTuple):
    """Gradients of what went into a layer."""

    x: Tensor | None
    weight: Tensor
    bias: Tensor


def forward(kernels: Kernels, x: Tensor, given: Given) -> Done:
    """Return x normalized by the average with the batch in it: `transport` from before, `mix`, and run."""
    plan, (weight, bias, eps, average, share, before, rectify) = _plan(x), given
    parts, y = plan.parts(x), torch.empty_like(x, memory_format=torch.channels_last)
    batch, new = (Moments(*(torch.empty_like(value) for value in average)) for _ in range(2))
    values = (weight, bias, *average, *(before or average), share, constant(eps, x.device))
    with on(x.device):
        plan.start(kernels["norm_parts"], [x, *plan.sizes, parts])
        told = [x, *values, parts, int(before is not None), int(rectify), *plan.sizes]
        plan.start(kernels["norm_forward"], [*told, *batch, *new, y])
    return Done(y, batch, new)


def backward(kernels: Kernels, dy: Tensor, held: Held, *, of_x: bool) -> Slopes:
    """Return the gradients of batch renormalization, whose r and d are constants.

    With x_b = (x - m_b) / s_b over M values of a channel, S_1 = sum dy and S_2 = sum dy x_b:
    dx = (w r / s_b) (dy - S_1 / M - x_b S_2 / M), dw = r S_2 + d S_1, db = S_1. Where a rectified y was cut
    off, dy is 0.
    """
    x, weight, bias, eps, batch, average, rectified = held
    dy, plan = dy.contiguous(memory_format=torch.channels_last), _plan(x)
    parts, d_weight, d_bias = plan.parts(x), torch.empty_like(weight), torch.empty_like(weight)
    dx = torch.empty_like(x, memory_format=torch.channels_last) if of_x else None
    with on(x.device):
        least, given, cut = constant(eps, x.device), [x, dy, weight, bias], int(rectified)
        plan.start(kernels["norm_sums"], [*given, batch.mean, *average, least, cut, *plan.sizes, parts])
        told = [*given, *batch, *average, least, parts, int(of_x), cut, *plan.sizes]
        # Where nobody wants dx there are no rows to write, and one block of each channel does.
        blocks = plan.blocks if of_x else 1
        plan.start(kernels["norm_backward"], [*told, d_weight, d_bias, dy if dx is None else dx], blocks)
    return Slopes(dx, d_weight, d_bias)


class _Plan(NamedTuple):
    """How a batch, seen as rows of channels, is dealt out to blocks."""

    tiles: int  # of LANES channels
    blocks: int  # of `chunk` rows, the last one of what is left
    rows: int
    channels: int
    chunk: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What every kernel is told."""
        return self.rows, self.channels, self.chunk, self.blocks

    def parts(self, x: Tensor) -> Tensor:
        """Return room for two numbers of every block and channel."""
        return x.new_empty(2, self.blocks, self.channels)

    def start(self, kernel: Kernel, told: list[Any], blocks: int | None = None) -> None:
        """Start a kernel on all blocks, or on the first ones."""
        kernel((self.tiles, blocks or self.blocks, 1), (THREADS, 1, 1), told)


def _plan(x: Tensor) -> _Plan:
    channels = x.shape[1]
    rows, tiles = x.numel() // channels, -(-channels // LANES)
    most = -(-BLOCKS * _processors(x.device) // tiles)
    chunk = -(-rows // max(1, min(most, rows // LEAST_ROWS)))
    return _Plan(tiles, -(-rows // chunk), rows, channels, chunk)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def kernels_of(device: int) -> Kernels | None:
    """Return the kernels of a device by name; None where they cannot be compiled."""
    found = compiled(source(), NAMES, device)
    return None if found is None else dict(zip(NAMES, found, strict=True))


def source(threads: int = THREADS, lanes: int = LANES) -> str:
    """Return the text of the kernels with their constants."""
    constants = {"THREADS": threads, "LANES": lanes, "AHEAD": AHEAD}
    return with_constants(bookkeeping.source(KERNELS), constants)
