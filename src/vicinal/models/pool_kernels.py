"""The kernels of max pooling with its gradient: one forward and one backward, which move little memory.

torch keeps eight bytes for every output, where in its image the maximum was, and adds gradients up where
those point. Here a byte says which place of its window an output took, and every input looks at the few
windows that cover it, always in the same order: the same batch gives the same bits. torch compiles the
kernels at run time with NVRTC, for one geometry each.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vicinal.kernels import Kernel, compiled, on, with_constants

THREADS = 256  # of a block
MOST_BYTES = 16  # that a thread asks the memory for at once
MOST_STEPS = 128  # places times channels of a thread: all are written out, for registers to hold them
MOST_PLACES = 256  # of a window, which a byte can tell apart
NAMES = ("pool_forward", "pool_backward")
KERNELS = """
#if HALF  // bfloat16, the upper half of a float: two of them in a word, the first one below
#define IN_WORD (LANES > 1 ? 2 : 1)
#define LOWEST 0xff80ff80
#if LANES > 1
typedef unsigned Word;
#else
typedef unsigned short Word;
#endif
__device__ float value_in(Word word, int lane) {
    return __uint_as_float(lane % 2 ? word & 0xffff0000 : (unsigned)word << 16);
}
__device__ Word word_of(unsigned bits, int lane) { return lane % 2 ? bits & 0xffff0000 : bits >> 16; }
// To the nearest; of two as near, the even one.
__device__ unsigned rounded(float value) {
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fc00000 : bits + 0x7fff + (bits >> 16 & 1);
}
#else
#define IN_WORD 1
#define LOWEST 0xff800000
typedef unsigned Word;
__device__ float value_in(Word word, int lane) { return __uint_as_float(word); }
__device__ Word word_of(unsigned bits, int lane) { return bits; }
__device__ unsigned rounded(float value) { return __float_as_uint(value); }
#endif
#define WORDS (LANES / IN_WORD)

struct alignas(WORDS * sizeof(Word)) Values { Word of[WORDS]; };  // of neighboring channels
struct alignas(LANES) Places { unsigned char of[LANES]; };  // in a window, row by row
struct Spot { int image, row, column, pack; };  // of a thread; packs of channels are neighbors

__device__ Spot spot_of(int rows, int columns, int packs) {
    unsigned number = (unsigned)blockIdx.x * THREADS + threadIdx.x;
    const int pack = number % packs;
    number /= packs;
    const int column = number % columns;
    number /= columns;
    return {(int)(number / rows), (int)(number % rows), column, pack};
}

// A thread for every output. What lies outside the image is lowest and is never taken.
extern "C" __global__ void __launch_bounds__(THREADS) pool_forward(
    const Values* __restrict__ x, int images, int rows, int columns, int out_rows, int out_columns, int packs,
    int keeps, Values* __restrict__ y, Places* __restrict__ places) {
    const Spot out = spot_of(out_rows, out_columns, packs);
    if (out.image >= images) return;
    const int top = out.row * DOWN - ABOVE, left = out.column * ACROSS - BEFORE;
    const int first = (top < 0 ? -top * WIDE : 0) + (left < 0 ? -left : 0);
    float best[LANES];
    int place[LANES];
    #pragma unroll
    for (int l = 0; l < LANES; ++l) best[l] = value_in((Word)LOWEST, l), place[l] = first;
    #pragma unroll
    for (int i = 0; i < TALL; ++i) {
        Values line[WIDE];  // all of it is asked for before the first is looked at
        #pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            const int row = top + i, column = left + j;
            #pragma unroll
            for (int w = 0; w < WORDS; ++w) line[j].of[w] = (Word)LOWEST;
            if (row >= 0 && row < rows && column >= 0 && column < columns)
                line[j] = x[((out.image * rows + row) * columns + column) * packs + out.pack];
        }
        #pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            #pragma unroll
            for (int l = 0; l < LANES; ++l) {
                const float value = value_in(line[j].of[l / IN_WORD], l);
                if (value > best[l] || value != value) best[l] = value, place[l] = i * WIDE + j;
            }
        }
    }
    Values values = {};
    Places kept;
    #pragma unroll
    for (int l = 0; l < LANES; ++l) {
        values.of[l / IN_WORD] |= word_of(__float_as_uint(best[l]), l);
        kept.of[l] = place[l];
    }
    const int at = ((out.image * out_rows + out.row) * out_columns + out.column) * packs + out.pack;
    y[at] = values;
    if (keeps) places[at] = kept;
}

// A thread for every patch of DOWN x ACROSS inputs, counted from the padding's corner: patch q has the first
// inputs of window q, the next ones of window q - 1, and so on. Which place of a window an input of the patch
// has does not depend on q.
extern "C" __global__ void __launch_bounds__(THREADS) pool_backward(
    const Values* __restrict__ dy, const Places* __restrict__ places, int images, int rows, int columns,
    int out_rows, int out_columns, int packs, Values* __restrict__ dx) {
    const Spot patch = spot_of((rows + ABOVE - 1) / DOWN + 1, (columns + BEFORE - 1) / ACROSS + 1, packs);
    if (patch.image >= images) return;
    const int asides = (WIDE - 1) / ACROSS + 1;
    float sums[DOWN][ACROSS][LANES] = {};
    #pragma unroll
    for (int back = (TALL - 1) / DOWN; back >= 0; --back) {
        Values slopes[asides];
        Places kept[asides];
        #pragma unroll
        for (int aside = 0; aside < asides; ++aside) {
            const int row = patch.row - back, column = patch.column - aside;
            const bool there = row >= 0 && row < out_rows && column >= 0 && column < out_columns;
            const int at = ((patch.image * out_rows + row) * out_columns + column) * packs + patch.pack;
            kept[aside] = places[there ? at : 0];  // of any window: where there is none, nothing is added
            slopes[aside] = {};
            if (there) slopes[aside] = dy[at];
        }
        #pragma unroll
        for (int j = WIDE - 1; j >= 0; --j) {
            #pragma unroll
            for (int i = back * DOWN; i < (back + 1) * DOWN && i < TALL; ++i) {
                #pragma unroll
                for (int l = 0; l < LANES; ++l)
                    if (kept[j / ACROSS].of[l] == i * WIDE + j)
                        sums[i % DOWN][j % ACROSS][l] += value_in(slopes[j / ACROSS].of[l / IN_WORD], l);
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < DOWN; ++i) {
        #pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
            const int row = patch.row * DOWN - ABOVE + i, column = patch.column * ACROSS - BEFORE + j;
            if (row < 0 || row >= rows || column < 0 || column >= columns) continue;
            Values values = {};
            #pragma unroll
            for (int l = 0; l < LANES; ++l) values.of[l / IN_WORD] |= word_of(rounded(sums[i][j][l]), l);
            dx[((patch.image * rows + row) * columns + column) * packs + patch.pack] = values;
        }
    }
}
"""


class Geometry(NamedTuple):
    """Size, steps and padding of the windows."""

    tall: int
    wide: int
    down: int
    across: int
    above: int
    before: int

    def outputs(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many windows an image has."""
        last_row, last_column = rows + 2 * self.above - self.tall, columns + 2 * self.before - self.wide
        return last_row // self.down + 1, last_column // self.across + 1

    def patches(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many patches of one step an image has, those that are half padding too."""
        return (rows + self.above - 1) // self.down + 1, (columns + self.before - 1) // self.across + 1

    @property
    def places(self) -> int:
        """How many places a window or a patch has, whichever has more."""
        return max(self.tall * self.wide, self.down * self.across)

    @property
    def allowed(self) -> bool:
        """Whether torch and the kernels know such windows."""
        padded = 0 <= 2 * self.above <= self.tall and 0 <= 2 * self.before <= self.wide
        return padded and self.places <= MOST_PLACES and min(self.down, self.across) > 0


class Pool(NamedTuple):
    """Kernels made for a geometry, a precision and so many channels a thread."""

    geometry: Geometry
    lanes: int
    forward: Kernel
    backward: Kernel

    def start(self, kernel: Kernel, told: list[Any], spots: int) -> None:
        """Start a kernel with a thread for every spot and pack of channels."""
        kernel((-(-spots // (self.lanes * THREADS)), 1, 1), (THREADS, 1, 1), told)

    def sizes(self, shape: torch.Size) -> list[int]:
        """Return what both kernels are told of an input."""
        images, channels, rows, columns = shape
        return [images, rows, columns, *self.geometry.outputs(rows, columns), channels // self.lanes]

    def pooled(self, x: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        """Return the largest value of every window and, if they are kept, the place that it had there."""
        y, places = empty_outputs(x, self.geometry, keep=keep)
        with on(x.device):
            self.start(self.forward, [x, *self.sizes(x.shape), int(keep), y, places], y.numel())
        return y, places

    def spread(self, dy: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
        """Return for every input the sum of dy over the windows that took it."""
        dy = dy.contiguous(memory_format=torch.channels_last)
        if dy.data_ptr() % MOST_BYTES:  # a part of something else
            dy = dy.clone()
        dx = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        rows, columns = self.geometry.patches(*shape[2:])
        with on(dy.device):
            told = [dy, places, *self.sizes(shape), dx]
            self.start(self.backward, told, shape[0] * shape[1] * rows * columns)
        return dx


def empty_outputs(x: Tensor, geometry: Geometry, *, keep: bool = True) -> tuple[Tensor, Tensor]:
    """Return memory for what is pooled and for its places; for no places where they are not kept."""
    shape, none = (*x.shape[:2], *geometry.outputs(*x.shape[2:])), (0, 0, 0, 0)
    return (
        torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last),
        torch.empty(
            shape if keep else none,
            dtype=torch.uint8,
            device=x.device,
            memory_format=torch.channels_last,
        ),
    )


def lanes_of(x: Tensor, geometry: Geometry) -> int:
    """Return how many channels a thread takes: what it reads at once, a power of two that divides them."""
    size = x.element_size()
    lanes = MOST_BYTES // size
    while lanes > 1 and (
        x.shape[1] % lanes or x.data_ptr() % (lanes * size) or lanes * geometry.places > MOST_STEPS
    ):
        lanes //= 2
    return lanes


@cache
def kernels_of(device: int, geometry: Geometry, half: bool, lanes: int) -> list[Kernel] | None:
    """Return forward and backward of a device; None where they cannot be compiled."""
    return compiled(source(geometry, half, lanes), NAMES, device)


def source(geometry: Geometry, half: bool, lanes: int) -> str:
    """Return the text of the kernels with their constants."""
    sizes = {name.upper(): value for name, value in geometry._asdict().items()}
    return with_constants(KERNELS, {"HALF": int(half), "LANES": lanes, "THREADS": THREADS, **sizes})
