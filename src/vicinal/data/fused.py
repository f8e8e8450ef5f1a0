"""The whole augmentation as two CUDA kernels: bytes in, floats out, nothing of full size in between.

torch compiles them at run time (NVRTC, no compiler needed on the machine). Formulas are those of `augment`
and `colour`; where the kernels cannot be compiled, the caller takes that way instead.
"""

from functools import cache

import torch
from torch import Tensor

from vicinal.data.colour import BLUE, CONTRAST, GREEN, HUE, RED, SATURATION, SMALLEST_SPREAD, upload
from vicinal.kernels import Kernel, compiled, with_constants

# The columns of a sample's row: its box, flip, order (two bits for each step), factors by operation, gray.
ROW = (
    "top",
    "left",
    "height",
    "width",
    "flip",
    "order",
    "brightness",
    "contrast",
    "saturation",
    "hue",
    "gray",
)
THREADS = 256
# Partial sums of an image's luminance, added up in a fixed order: the same draws give the same bits.
PARTS = 16

SOURCE = """
struct Sample { float top, left, tall, wide, flip, order, factors[4], gray; };

__device__ float light_of(const float* p) {
    return CHANNELS == 1 ? p[0] : RED * p[0] + GREEN * p[1] + BLUE * p[2];
}

// Unlike fminf and fmaxf this keeps a NaN, as torch.clamp does.
__device__ float held(float value, float low, float high) {
    return value < low ? low : value > high ? high : value;
}

// The crop, resized bilinearly: positions are held inside the box.
__device__ void read(const PIXEL* image, const Sample& s, int place, int height, int width, float* p) {
    const int row = place / width, flipped = place - row * width;
    const int column = s.flip > 0 ? width - 1 - flipped : flipped;
    const float y = held((row + 0.5f) * s.tall / height - 0.5f, 0, s.tall - 1);
    const float x = held((column + 0.5f) * s.wide / width - 0.5f, 0, s.wide - 1);
    const float down = y - floorf(y), across = x - floorf(x);
    const int top = (int)s.top + (int)y, left = (int)s.left + (int)x;
    const int below = y < s.tall - 1 ? width : 0, beside = x < s.wide - 1 ? 1 : 0;
    for (int c = 0; c < CHANNELS; ++c) {
        const PIXEL* at = image + ((long long)c * height + top) * width + left;
        const float upper = at[0] + across * ((float)at[beside] - at[0]);
        const float lower = at[below] + across * ((float)at[below + beside] - at[below]);
        p[c] = SCALE * (upper + down * (lower - upper));
    }
}

__device__ void turn_hue(float* p, float turn) {
    const float r = p[0], g = p[1], b = p[2];
    const float top = fmaxf(fmaxf(r, g), b), low = fminf(fminf(r, g), b), spread = top - low;
    const float from_red = 1 + (g + b - r - low) / fmaxf(spread, SMALLEST_SPREAD);
    float hue = (g < b ? -from_red : from_red) / 6 + turn;
    hue = 6 * (hue - floorf(hue));
    p[0] = top - spread * held(2 - fabsf(hue - 3), 0, 1);
    p[1] = low + spread * held(2 - fabsf(hue - 2), 0, 1);
    p[2] = low + spread * held(2 - fabsf(hue - 4), 0, 1);
}

// Runs the steps in the sample's order; without a mean luminance it stops where the contrast would need one.
__device__ void jitter(float* p, const Sample& s, const float* mean) {
    for (int step = 0; step < 4; ++step) {
        const int operation = ((int)s.order >> (2 * step)) & 3;
        if (operation == CONTRAST && !mean) return;
        if (operation == HUE) {
            if (CHANNELS == 3 && s.factors[HUE] != 0) turn_hue(p, s.factors[HUE]);
            continue;
        }
        const float keep = s.factors[operation];
        if (keep == 1 || (operation == SATURATION && CHANNELS == 1)) continue;
        const float other = operation == CONTRAST ? *mean : operation == SATURATION ? light_of(p) : 0;
        for (int c = 0; c < CHANNELS; ++c) p[c] = held(keep * p[c] + (1 - keep) * other, 0, 1);
    }
}

extern "C" __global__ void measure(const PIXEL* images, const Sample* samples, float* sums,
                                   int height, int width) {
    __shared__ float shared[THREADS];
    const Sample s = samples[blockIdx.x];
    const PIXEL* image = images + (long long)blockIdx.x * CHANNELS * height * width;
    float p[CHANNELS], sum = 0;
    const int end = s.factors[CONTRAST] == 1 ? 0 : height * width;
    for (int place = blockIdx.y * THREADS + threadIdx.x; place < end; place += PARTS * THREADS) {
        read(image, s, place, height, width, p);
        jitter(p, s, nullptr);
        sum += light_of(p);
    }
    shared[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    if (threadIdx.x == 0) sums[blockIdx.x * PARTS + blockIdx.y] = shared[0] / (height * width);
}

extern "C" __global__ void augment(const PIXEL* images, const Sample* samples, const float* sums,
                                   float* results, int height, int width) {
    const int place = blockIdx.y * THREADS + threadIdx.x;
    if (place >= height * width) return;
    const Sample s = samples[blockIdx.x];
    const long long pixels = (long long)height * width, start = blockIdx.x * CHANNELS * pixels;
    float p[CHANNELS], mean = 0;
    for (int part = 0; part < PARTS; ++part) mean += sums[blockIdx.x * PARTS + part];
    read(images + start, s, place, height, width, p);
    jitter(p, s, &mean);
    if (CHANNELS == 3 && s.gray > 0) p[0] = p[1] = p[2] = light_of(p);
    for (int c = 0; c < CHANNELS; ++c) results[start + (long long)place * CHANNELS + c] = p[c];
}
"""


def augment_fused(images: Tensor, rows: Tensor) -> Tensor | None:
    """Return float32 images for bytes or floats (N, 1 or 3, H, W) on CUDA; None where this way is closed.

    rows (N, 11), on the CPU, holds the columns named in ROW.
    """
    count, channels, height, width = images.shape
    if images.device.type != "cuda" or channels not in (1, 3) or images.numel() == 0:
        return None
    kernels = _kernels(images.device.index, images.dtype == torch.uint8, channels)
    if kernels is None:
        return None
    pixels = images.contiguous() if images.dtype == torch.uint8 else images.float().contiguous()
    with torch.cuda.device(images.device):
        samples = upload(rows.float(), images.device)
        sums = torch.empty(count, PARTS, device=images.device)
        # Channels last, as the nets on a GPU take images.
        results = torch.empty(images.shape, device=images.device, memory_format=torch.channels_last)
        block = (THREADS, 1, 1)
        kernels[0]((count, PARTS, 1), block, [pixels, samples, sums, height, width])
        blocks = -(-height * width // THREADS)
        kernels[1]((count, blocks, 1), block, [pixels, samples, sums, results, height, width])
    return results


@cache
def _kernels(device: int, whole_levels: bool, channels: int) -> list[Kernel] | None:
    """Return (measure, augment) for a device and kind of pixels, or None where they cannot be compiled."""
    return compiled(source(whole_levels, channels), ("measure", "augment"), device)


def source(whole_levels: bool, channels: int) -> str:
    """Return the text of the kernels with the constants of a kind of pixels."""
    constants = {
        "PIXEL": "unsigned char" if whole_levels else "float",
        "SCALE": "(1.0f / 255)" if whole_levels else "1.0f",
        "CHANNELS": channels,
        "THREADS": THREADS,
        "PARTS": PARTS,
        "CONTRAST": CONTRAST,
        "SATURATION": SATURATION,
        "HUE": HUE,
        "RED": f"{RED}f",
        "GREEN": f"{GREEN}f",
        "BLUE": f"{BLUE}f",
        "SMALLEST_SPREAD": f"{SMALLEST_SPREAD}f",
    }
    return with_constants(SOURCE, constants)
