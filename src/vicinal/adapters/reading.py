"""What the out-of-fold phi reads off a batch and its stream: on a GPU one kernel in place of three hundred.

The formulas are those of `functional.memory` and `StreamInferenceNet`; starting their kernels takes all the
time. One block does the whole reading: a few classes and a batch are little work, and every part of it has to
wait for the one before. torch compiles the kernel at run time with NVRTC; where it cannot be had, or there is
too much to do for one block, the formulas run as written.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from vicinal.functional.memory import EVIDENCE, NUMBERS, RARE, ROUNDING
from vicinal.kernels import Kernel, compiled, constant, on, suited, with_constants
from vicinal.models.inference import StreamInferenceNet
from vicinal.types import GaussianW, Head, StreamMemory

THREADS = 1024  # of the one block
LANES = 32  # threads that add up one sum, at most a warp; both are powers of two
MANY = 4  # classes for which a thread reads a feature once
MOST_CLASSES = 256  # whose numbers fit into the memory that a block shares
# Images times classes times features, above which one block is slower than the formulas: by an estimate.
MOST_WORK = 3_000_000
SOURCE = """
struct Sums { float centred, mean, row, total; };  // over the features: squares, and products with centred
struct Answer { float step, beta, spread; };  // of phi's net, of a class; the logarithm of the spread
struct Weights { float weights, labels, square; };  // of a class, over the images
struct alignas(16) Four { float of[4]; };  // read at once
static_assert(EVIDENCE % 4 == 0, "rows of phi's net are whole Fours");
struct Many { float of[MANY]; };  // the same of so many classes, side by side

struct Block {  // what its threads share
    Many slots[THREADS];
    Sums of_class[MOST_CLASSES + 1];  // the last one: of the mean of the stream
    float counts[MOST_CLASSES], norms[MOST_CLASSES], moved[MOST_CLASSES];
    float row_norms[MOST_CLASSES], row_lengths[MOST_CLASSES];
    float evidence[MOST_CLASSES][NUMBERS], averages[NUMBERS], squares[MOST_CLASSES];
    float given[THREADS / LANES][EVIDENCE];  // what phi's net is told of the class of each row of threads
};

__device__ float together(float a, float b) { return a + b; }

__device__ Sums together(Sums a, Sums b) {
    return {a.centred + b.centred, a.mean + b.mean, a.row + b.row, a.total + b.total};
}

__device__ Answer together(Answer a, Answer b) {
    return {a.step + b.step, a.beta + b.beta, a.spread + b.spread};
}

__device__ Weights together(Weights a, Weights b) {
    return {a.weights + b.weights, a.labels + b.labels, a.square + b.square};
}

__device__ Many together(Many a, Many b) {
    for (int k = 0; k < MANY; ++k) a.of[k] += b.of[k];
    return a;
}

// Each row of a matrix is added up by LANES threads, all of which then hold its sum. They are of one warp and
// wait for each other alone. All threads of a row come here.
template <class T> __device__ T added(Block& block, T mine) {
    const int lane = threadIdx.x % LANES;
    Many* slot = block.slots + threadIdx.x;  // of this thread, whatever it adds up
    *(T*)slot = mine;
    for (int half = LANES / 2; half > 0; half /= 2) {
        __syncwarp();
        if (lane < half) *(T*)slot = together(*(T*)slot, *(T*)(slot + half));
    }
    __syncwarp();
    const T whole = *(T*)(slot - lane);
    __syncwarp();
    return whole;
}

__device__ float average_of(const float* values, int count) {
    float sum = 0;
    for (int c = 0; c < count; ++c) sum += values[c];
    return sum / count;
}

// Logits become probabilities, a row of threads for an image; y may be where the logits are.
__device__ void soften(Block& block, const float* logits, float* y, int images, int classes) {
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, groups = THREADS / LANES;
    for (int first = 0; first < images; first += groups) {
        const int n = first + group, start = n * classes, count = n < images ? classes : 0;
        float largest = count ? logits[start] : 0, mine = 0;
        for (int c = 1; c < count; ++c) largest = fmaxf(largest, logits[start + c]);
        __syncwarp();
        for (int c = lane; c < count; c += LANES) mine += y[start + c] = expf(logits[start + c] - largest);
        const float sum = added(block, mine);
        for (int c = lane; c < count; c += LANES) y[start + c] /= sum;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) read_stream(
    const float* __restrict__ z, const float* __restrict__ logits, const float* __restrict__ weight,
    const float* __restrict__ bias, const float* __restrict__ old_sums, const float* old_counts,
    const float* old_mass, const float* old_marginal, const float* old_squares,
    const float* __restrict__ phi, const float* decay_by,
    int images, int classes, int features, int hidden, int rounds,
    float* mean, float* spread, float* new_bias, float* trust,
    float* sums, float* count, float* mass, float* marginal, float* squares,
    float* y, float* energy, float* total, float* row_mean) {
    __shared__ Block block;
    float *counts = block.counts, *norms = block.norms, *moved = block.moved;
    float *row_norms = block.row_norms, *row_lengths = block.row_lengths, *averages = block.averages;
    Sums* of_class = block.of_class;
    const int t = threadIdx.x, lane = t % LANES, group = t / LANES, groups = THREADS / LANES;
    const float decay = *decay_by;
    const float *location = phi, *scale = location + EVIDENCE;
    const float *low = scale + EVIDENCE, *high = low + EVIDENCE;
    const float *into = high + EVIDENCE, *into_bias = into + hidden * EVIDENCE, *out = into_bias + hidden;
    const float *out_bias = out + 3 * hidden, *log_temperature = out_bias + 3;
    const float cool = expf(-*log_temperature), marginal_weight = log_temperature[1];

    soften(block, logits, y, images, classes);
    for (int first = 0; first < images; first += groups) {
        const int n = first + group;
        float mine = 0;
        for (int j = lane; n < images && j < features; j += LANES)
            mine += z[n * features + j] * z[n * features + j];
        mine = added(block, mine);
        if (n < images && lane == 0) energy[n] = mine;
    }
    for (int j = t; j < features; j += THREADS) {
        float sum = 0;
        for (int c = 0; c < classes; ++c) sum += weight[c * features + j];
        row_mean[j] = sum / classes;
    }
    __syncthreads();
    for (int first = 0; first < classes; first += groups) {
        const int c = first + group;
        Sums mine = {0, 0, 0, 0};
        for (int j = lane; c < classes && j < features; j += LANES) {
            const float w = weight[c * features + j], centred = w - row_mean[j];
            mine.mean += w * w;
            mine.row += centred * centred;
        }
        mine = added(block, mine);
        if (c < classes && lane == 0) row_lengths[c] = sqrtf(mine.mean), row_norms[c] = sqrtf(mine.row);
    }
    __syncthreads();
    const float row_size = average_of(row_lengths, classes);
    const float row_average = fmaxf(average_of(row_norms, classes), 1e-6f);

    for (int turn = 0; turn <= rounds; ++turn) {
        // The memory with the batch in it, under the labels of the turn before.
        for (int i = t; i < (classes + MANY - 1) / MANY * features; i += THREADS) {
            const int from = i / features * MANY, j = i % features, last = classes - 1 - from;
            Many sum = {};
            #pragma unroll 4
            for (int n = 0; n < images; ++n) {
                const float value = z[n * features + j];  // once for all of them
                for (int k = 0; k < MANY; ++k) {
                    const float p = y[n * classes + from + (k < last ? k : last)];
                    sum.of[k] += p * p * value;
                }
            }
            for (int k = 0; k < MANY; ++k) {
                const int at = (from + k) * features + j;
                if (k <= last) sums[at] = sum.of[k] + decay * old_sums[at];
            }
        }
        for (int first = 0; first < classes; first += groups) {
            const int c = first + group;
            Weights mine = {0, 0, 0};
            for (int n = lane; c < classes && n < images; n += LANES) {
                const float p = y[n * classes + c];
                mine = together(mine, {p * p, p, p * p * energy[n]});
            }
            mine = added(block, mine);
            if (c >= classes || lane > 0) continue;
            const float share = mine.labels / images;
            count[c] = counts[c] = mine.weights + decay * old_counts[c];
            mass[c] = mine.labels + decay * old_mass[c];
            marginal[c] = share + decay * (old_marginal[c] - share);
            squares[c] = block.squares[c] = mine.square + decay * old_squares[c];
        }
        __syncthreads();

        float summed = 0, all_squares = 0;
        for (int c = 0; c < classes; ++c) summed += counts[c], all_squares += block.squares[c];
        const float safe = fmaxf(summed, TINY);
        for (int j = t; j < features; j += THREADS) {
            float sum = 0;
            for (int c = 0; c < classes; ++c) sum += sums[c * features + j];
            total[j] = sum / safe;
        }
        __syncthreads();
        for (int first = 0; first <= classes; first += groups) {
            const int c = first + group;
            Sums mine = {0, 0, 0, 0};
            for (int j = lane; c <= classes && j < features; j += LANES) {
                const float middle = total[j];
                if (c == classes) {
                    mine.total += middle * middle;
                    continue;
                }
                const float m = sums[c * features + j] / fmaxf(counts[c], TINY), centred = m - middle;
                mine.centred += centred * centred;
                mine.mean += m * m;
                mine.row += centred * (weight[c * features + j] - row_mean[j]);
                mine.total += centred * middle;
            }
            mine = added(block, mine);
            if (c <= classes && lane == 0) of_class[c] = mine;
        }
        __syncthreads();

        const float middle = sqrtf(of_class[classes].total), whole = all_squares / safe;
        for (int c = t; c < classes; c += THREADS) {
            const float norm = sqrtf(of_class[c].centred);
            norms[c] = norm > ROUNDING * middle && counts[c] > 0 ? norm : 0;
        }
        __syncthreads();
        const float norm_average = fmaxf(average_of(norms, classes), 1e-6f);
        const float overall = fmaxf(fmaxf(whole - middle * middle, ROUNDING * whole), TINY);
        for (int c = t; c < classes; c += THREADS) {
            const Sums at = of_class[c];
            const float within = block.squares[c] / fmaxf(counts[c], TINY) - at.mean;
            const float wide = counts[c] > RARE ? fmaxf(within, 0.f) / overall : 1.f;
            float* numbers = block.evidence[c];
            numbers[0] = fmaxf(logf(counts[c] + 1e-6f), -5.f);
            numbers[1] = norms[c] > 0 ? at.row / (fmaxf(norms[c], 1e-6f) * fmaxf(row_norms[c], 1e-6f)) : 0;
            numbers[2] = counts[c] / fmaxf(mass[c], 1e-6f);
            numbers[3] = norms[c] / norm_average;
            numbers[4] = row_norms[c] / row_average;
            numbers[5] = logf(marginal[c] * classes + 1e-3f);
            numbers[6] = logf(wide + 1e-2f);
            numbers[7] = logf(counts[c] * classes / fmaxf(summed, 1e-6f) + 1e-3f);
        }
        __syncthreads();
        for (int k = t; k < NUMBERS; k += THREADS) {
            float sum = 0;
            for (int c = 0; c < classes; ++c) sum += block.evidence[c][k];
            averages[k] = sum / classes;
        }
        __syncthreads();

        for (int c = group; c < classes; c += groups) {  // all threads of a row, or none
            float* given = block.given[group];
            float excess = 0;
            for (int k = lane; k < EVIDENCE; k += LANES) {
                const float number = k < NUMBERS ? block.evidence[c][k] : averages[k - NUMBERS];
                excess += (fmaxf(low[k] - number, 0.f) + fmaxf(number - high[k], 0.f)) / scale[k];
                given[k] = (number - location[k]) / scale[k];
            }
            excess = added(block, excess);  // which waits for what is given as well
            Answer mine = {0, 0, 0};
            for (int h = lane; turn < rounds && h < hidden; h += LANES) {
                const Four* row = (const Four*)(into + h * EVIDENCE);
                float unit = into_bias[h];
                for (int k = 0; k < EVIDENCE; ++k) unit += row[k / 4].of[k % 4] * given[k];
                unit = fmaxf(unit, 0.f);
                mine = together(mine, {out[h] * unit, out[hidden + h] * unit, out[2 * hidden + h] * unit});
            }
            const Answer answer = added(block, mine);
            if (lane > 0) continue;
            if (turn == rounds) {
                trust[c] = expf(-excess);
                continue;
            }
            moved[c] = norms[c] > 0 ? (answer.step + out_bias[0]) * row_size / norm_average : 0;
            const float prior = marginal_weight * logf(marginal[c] + 1e-3f), beta = answer.beta + out_bias[1];
            new_bias[c] = (bias[c] + beta + prior - moved[c] * of_class[c].total) * cool;
            spread[c] = expf(answer.spread + out_bias[2]) * row_size * cool / sqrtf(features);
        }
        __syncthreads();
        if (turn == rounds) return;

        for (int i = t; i < classes * features; i += THREADS) {
            const int c = i / features, j = i % features;
            const float centred = sums[i] / fmaxf(counts[c], TINY) - total[j];
            mean[i] = (weight[i] + moved[c] * centred) * cool;
        }
        __syncthreads();
        const int parts = (classes + MANY - 1) / MANY;
        for (int first = 0; first < images * parts; first += groups) {
            const int i = first + group, n = i / parts, from = i % parts * MANY, last = classes - 1 - from;
            Many mine = {};
            #pragma unroll 4
            for (int j = lane; i < images * parts && j < features; j += LANES) {
                const float value = z[n * features + j];
                for (int k = 0; k < MANY; ++k)
                    mine.of[k] += value * mean[(from + (k < last ? k : last)) * features + j];
            }
            mine = added(block, mine);
            if (i >= images * parts || lane > 0) continue;
            for (int k = 0; k < MANY; ++k)
                if (k <= last) y[n * classes + from + k] = mine.of[k] + new_bias[from + k];
        }
        __syncthreads();
        soften(block, y, y, images, classes);
    }
}
"""


class Reading(NamedTuple):
    """What phi says of a batch."""

    w: GaussianW
    memory: StreamMemory  # with the batch in it
    trust: Tensor  # (C,) how far each class lies inside what phi was fitted on


@torch.no_grad()
def read(phi: StreamInferenceNet, z: Tensor, logits: Tensor, head: Head, memory: StreamMemory) -> Reading:
    """Return w for a batch, the memory that holds it, and the trust in each class."""
    kernel = _kernel(z, logits, *head, *memory, *phi.parameters())
    if kernel is None:
        w, after = phi(z, logits, head, memory)
        return Reading(w, after, phi.trust(after, head))
    (images, features), classes = z.shape, logits.shape[-1]
    mean, after = torch.empty_like(head.weight), StreamMemory(*(torch.empty_like(part) for part in memory))
    spread, bias, trust = (torch.empty_like(head.bias) for _ in range(3))
    scratch = [z.new_empty(count) for count in (images * classes, images, features, features)]
    decay = constant(phi.decay_of(images), z.device)
    given = [z, logits, *head, *memory, phi.packed(), decay]
    sizes = [images, classes, features, phi.shape["hidden"], phi.rounds]
    with on(z.device):
        kernel((1, 1, 1), (THREADS, 1, 1), [*given, *sizes, mean, spread, bias, trust, *after, *scratch])
    return Reading(GaussianW(mean, spread.unsqueeze(-1).expand_as(mean), bias), after, trust)


def _kernel(*values: Tensor) -> Kernel | None:
    """Return the kernel if it can work on these tensors, else None."""
    z, logits = values[:2]
    fits = logits.dim() == 2 and len(logits) > 0 and logits.shape[-1] <= MOST_CLASSES
    little = fits and z.numel() * logits.shape[-1] <= MOST_WORK
    return _compiled(z.device.index) if little and suited(*values) else None


@cache
def _compiled(device: int) -> Kernel | None:
    """Return the kernel of a device; None where it cannot be compiled."""
    found = compiled(source(), ["read_stream"], device)
    return None if found is None else found[0]


def source(threads: int = THREADS, lanes: int = LANES) -> str:
    """Return the text of the kernel with its constants."""
    constants = {
        "THREADS": threads,
        "LANES": lanes,
        "MANY": MANY,
        "MOST_CLASSES": MOST_CLASSES,
        "NUMBERS": len(NUMBERS),
        "EVIDENCE": len(EVIDENCE),
        "ROUNDING": f"{ROUNDING}f",
        "RARE": f"{RARE}f",
        "TINY": f"{torch.finfo(torch.float32).tiny}f",
    }
    return with_constants(SOURCE, constants)
