"""The augmentation of `fused` as machine code for the CPU; importing this module needs numba.

Every image is made row by row, so that a row stays in the fastest cache while all operations pass over it.
Constants are compiled in: whoever changes those of `colour` changes this file too, or old code is found.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from vicinal.data import colour
from vicinal.data.colour import BRIGHTNESS, CONTRAST, HUE, SATURATION
from vicinal.data.fused import ROW

Floats = NDArray[np.float32]
Places = NDArray[np.uint32]
Function = TypeVar("Function", bound=Callable[..., Any])

LEFT, WIDTH, FLIP, ORDER = ROW.index("left"), ROW.index("width"), ROW.index("flip"), ROW.index("order")
TOP, HEIGHT, FACTORS, GRAY = ROW.index("top"), ROW.index("height"), ROW.index("brightness"), ROW.index("gray")
# A literal would be a double, and so would be everything it touches.
ZERO, ONE, TWO, THREE, FOUR, SIX = (np.float32(value) for value in (0, 1, 2, 3, 4, 6))
RED, GREEN, BLUE = np.float32(colour.RED), np.float32(colour.GREEN), np.float32(colour.BLUE)
LIGHT = (RED, GREEN, BLUE)
SMALLEST_SPREAD = np.float32(colour.SMALLEST_SPREAD)
# Plain whole numbers would be compiled in: one more version of the code for each of them.
FIRST, STEPS = np.int64(0), np.int64(4)
# A product and a sum may become one instruction; NaN and infinity keep their meaning.
OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
# Sums may also be taken in another order, always the same one: many pixels are added at once.
SUMMING = OPTIONS | {"fastmath": {"contract", "reassoc"}}


def compiled(function: Function, options: dict[str, Any] = OPTIONS) -> Function:
    """Return the function as machine code, made when it is first called."""
    return cast(Function, numba.njit(**options)(function))


def kept_on_disk(function: Function) -> Function:
    """Return the function as machine code that later processes find again, where it can be written."""
    try:
        return compiled(function, OPTIONS | {"cache": True})
    except RuntimeError:
        # Neither the folder of this file nor the user's own can be written.
        return compiled(function)


@compiled
def measured_step(sample: NDArray[np.float64]) -> Any:
    """Return the step that needs the mean luminance of the image so far, or STEPS if none does."""
    if sample[FACTORS + CONTRAST] != 1:
        for step in range(STEPS):
            if operation_at(sample, step) == CONTRAST:
                return step
    return STEPS


@compiled
def operation_at(sample: NDArray[np.float64], step: int) -> int:
    """Return the operation that the sample's order puts at this step."""
    return (int(sample[ORDER]) >> (2 * step)) & 3


@compiled
def held(value: Any, low: Any, high: Any) -> Any:
    """Return the value, or the end of the range it is past; NaN stays NaN."""
    # One choice after the other: nested ones keep the compiler from working on many pixels at once.
    value = low if value < low else value
    return high if value > high else value


@compiled
def column_taps(sample: NDArray[np.float64], near: Places, across: Floats) -> None:
    """Fill in which two pixels of the box each column lies between, and how far it is from the first."""
    width, wide = len(across), sample[WIDTH]
    for column in range(width):
        place = held((column + 0.5) * wide / width - 0.5, 0.0, wide - 1)
        x = width - 1 - column if sample[FLIP] > 0 else column
        near[0, x] = np.uint32(place)
        across[x] = np.float32(place - near[0, x])
        # A pixel that has no weight is not read: a NaN in it is none of this one's.
        near[1, x] = near[0, x] if across[x] == ZERO else near[0, x] + np.uint32(1)


@compiled
def crop_row(
    image: NDArray[Any],
    sample: NDArray[np.float64],
    y: int,
    level: Any,
    near: Places,
    across: Floats,
    line: Floats,
    lines: Floats,
    loaded: NDArray[np.int64],
    result: Floats,
) -> None:
    """Fill row y of the result with the crop; lines keeps the two rows of the box last read, by parity."""
    channels, height, _ = image.shape
    tall = sample[HEIGHT]
    place = held((y + 0.5) * tall / height - 0.5, 0.0, tall - 1)
    upper = int(place)
    down = np.float32(place - upper)
    lower = upper if down == ZERO else upper + 1
    for row in (upper, lower):
        if loaded[row & 1] != row:
            loaded[row & 1] = row
            for c in range(channels):
                pixels = image[c, int(sample[TOP]) + row]
                widen(pixels, int(sample[LEFT]), int(sample[WIDTH]), level, line)
                resample(line, near, across, lines[row & 1, c])
    for c in range(channels):
        between(lines[upper & 1, c], lines[lower & 1, c], down, result[c, y])


@compiled
def widen(pixels: NDArray[Any], left: int, wide: int, level: Any, line: Floats) -> None:
    """Fill the line with the box's part of a row of pixels in [0, 1]."""
    part = pixels[left : left + wide]
    for x in range(wide):
        line[x] = np.float32(part[x]) / level


@compiled
def resample(line: Floats, near: Places, across: Floats, target: Floats) -> None:
    """Fill the target with the line read between its pixels."""
    for x in range(len(target)):
        here = line[near[0, x]]
        target[x] = here + across[x] * (line[near[1, x]] - here)


@compiled
def between(upper: Floats, lower: Floats, down: Any, target: Floats) -> None:
    """Fill the target with the rows mixed."""
    for x in range(len(target)):
        target[x] = upper[x] + down * (lower[x] - upper[x])


@compiled
def jitter_row(result: Floats, y: int, sample: NDArray[np.float64], first: Any, end: Any) -> None:
    """Change row y by these steps in the sample's order, and drop its colour after the last of all."""
    channels = len(result)
    for step in range(first, end):
        operation = operation_at(sample, step)
        factor = np.float32(sample[FACTORS + operation])
        if operation == BRIGHTNESS and factor != ONE:
            for c in range(channels):
                blend(result[c, y], factor, ZERO)
        elif operation == SATURATION and channels == 3 and factor != ONE:
            scale_saturation(result[0, y], result[1, y], result[2, y], factor)
        elif operation == HUE and channels == 3 and factor != ZERO:
            turn_hue(result[0, y], result[1, y], result[2, y], factor)
    if end == STEPS and channels == 3 and sample[GRAY] > 0:
        drop_colour(result[0, y], result[1, y], result[2, y])


@partial(compiled, options=SUMMING)
def light_sum(result: Floats, y: int) -> float:
    """Return the sum of the luminance over row y."""
    light = 0.0
    for c in range(len(result)):
        row, total = result[c, y], ZERO
        for x in range(len(row)):
            total += row[x]
        light += float(total * (ONE if len(result) == 1 else LIGHT[c]))
    return light


@compiled
def blend(row: Floats, keep: Any, other: Any) -> None:
    """Scale the row and add to it, in place."""
    for x in range(len(row)):
        row[x] = held(keep * row[x] + other, ZERO, ONE)


@compiled
def scale_saturation(red: Floats, green: Floats, blue: Floats, keep: Any) -> None:
    """Blend with the luminance of each pixel, in place."""
    rest = ONE - keep
    for x in range(len(red)):
        r, g, b = red[x], green[x], blue[x]
        light = rest * (RED * r + GREEN * g + BLUE * b)
        red[x] = held(keep * r + light, ZERO, ONE)
        green[x] = held(keep * g + light, ZERO, ONE)
        blue[x] = held(keep * b + light, ZERO, ONE)


@compiled
def drop_colour(red: Floats, green: Floats, blue: Floats) -> None:
    """Put the luminance into every channel, in place."""
    for x in range(len(red)):
        light = RED * red[x] + GREEN * green[x] + BLUE * blue[x]
        red[x], green[x], blue[x] = light, light, light


@compiled
def turn_hue(red: Floats, green: Floats, blue: Floats, turn: Any) -> None:
    """Turn the hue as `colour.turn_hue_` does, in place."""
    # Within half a turn either way, so that one turn more or less brings every hue into [0, 6].
    turn = SIX * (turn - np.float32(np.round(turn)))
    for x in range(len(red)):
        r, g, b = red[x], green[x], blue[x]
        top, low = max(max(r, g), b), min(min(r, g), b)
        spread = top - low
        from_red = ONE + (g + b - r - low) / max(spread, SMALLEST_SPREAD)
        hue = (-from_red if g < b else from_red) + turn
        hue = hue + SIX if hue < ZERO else hue
        hue = hue - SIX if hue > SIX else hue
        red[x] = top - spread * held(TWO - abs(hue - THREE), ZERO, ONE)
        green[x] = low + spread * held(TWO - abs(hue - TWO), ZERO, ONE)
        blue[x] = low + spread * held(TWO - abs(hue - FOUR), ZERO, ONE)


@kept_on_disk
def augment_samples(images: NDArray[Any], samples: NDArray[np.float64], results: Floats, level: Any) -> None:
    """Fill results (N, C, H, W) with the augmented images; level is the pixel value that means white."""
    count, channels, height, width = images.shape
    near, across = np.empty((2, width), np.uint32), np.empty(width, np.float32)
    line, lines = np.empty(width, np.float32), np.empty((2, channels, width), np.float32)
    for n in range(count):
        sample, result = samples[n], results[n]
        contrast = measured_step(sample)
        column_taps(sample, near, across)
        loaded = np.full(2, -1)
        total = 0.0
        for y in range(height):
            crop_row(images[n], sample, y, level, near, across, line, lines, loaded, result)
            jitter_row(result, y, sample, FIRST, contrast)
            if contrast < STEPS:
                total += light_sum(result, y)
        if contrast < STEPS:
            keep = np.float32(sample[FACTORS + CONTRAST])
            other = (ONE - keep) * np.float32(total / (height * width))
            for y in range(height):
                for c in range(channels):
                    blend(result[c, y], keep, other)
                jitter_row(result, y, sample, contrast + 1, STEPS)
