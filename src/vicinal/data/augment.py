"""Random augmentation of whole batches on their device: resized crop, flip, colour jitter, grayscale."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample, interpolate

from vicinal.data.colour import HUE, jitter_, upload
from vicinal.data.fused import augment_fused
from vicinal.data.fused_cpu import augment_fused_cpu
from vicinal.errors import ConfigError, DataError

# As in torchvision: so many boxes are tried before the central one is taken.
TRIES = 10


class Draws(NamedTuple):
    """The random parameters of a batch, on the CPU."""

    boxes: Tensor  # (N, 4) int64: top, left, height, width of the crop in pixels
    flips: Tensor  # (N,) bool
    order: Tensor  # (N, 4) int64: the order of brightness 0, contrast 1, saturation 2, hue 3
    factors: Tensor  # (N, 4) float64: their factors, by operation; the hue's in turns
    gray: Tensor  # (N,) bool


@dataclass(frozen=True)
class Augment:
    """A random resized crop, flip, colour jitter and grayscale, drawn anew for each sample.

    The distributions are those of torchvision's RandomResizedCrop with scale (min_scale, 1) and ratio
    (1 / max_ratio, max_ratio), RandomHorizontalFlip, ColorJitter and RandomGrayscale; the output is as large
    as the input. Departs from torchvision: min_scale = 1 with max_ratio = 1 means no crop, also where the
    image is not square. Images are uint8 or float in [0, 1], with 1 or 3 channels where colours change.
    """

    min_scale: float = 0.8
    max_ratio: float = 4 / 3
    flip: bool = True
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    gray: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.min_scale <= 1:
            raise ConfigError(f"min_scale must be above 0 and at most 1, not {self.min_scale}")
        if not self.max_ratio >= 1 or math.isinf(self.max_ratio):
            raise ConfigError(f"max_ratio must be at least 1 and finite, not {self.max_ratio}")
        for name, most in (("brightness", math.inf), ("contrast", math.inf), ("saturation", math.inf)):
            if not 0 <= getattr(self, name) < most:
                raise ConfigError(f"{name} must be at least 0 and finite, not {getattr(self, name)}")
        for name, most in (("hue", 0.5), ("gray", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be between 0 and {most}, not {getattr(self, name)}")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return the batch with draws of its own for each sample; floats keep their dtype."""
        if self._changes_nothing():
            return x if x.is_floating_point() else unit_interval(x)
        y = self.apply(x, self.draw(len(x), x.shape[-2], x.shape[-1], generator))
        return y.to(x.dtype) if x.is_floating_point() else y

    def draw(self, count: int, height: int, width: int, generator: torch.Generator) -> Draws:
        """Return parameters for so many images, drawn on the generator's device and moved to the CPU once."""
        columns = 2 * TRIES + 12
        chance = torch.rand(count, columns, generator=generator, device=generator.device).cpu().double()
        crop, flips, order, factors, gray = torch.split(chance, [2 * TRIES + 2, 1, 4, 4, 1], dim=1)
        return Draws(
            self._draw_boxes(crop, height, width),
            (flips[:, 0] < 0.5) & self.flip,
            order.argsort(dim=1),
            self._draw_factors(factors),
            gray[:, 0] < self.gray,
        )

    @torch.no_grad()
    def apply(self, images: Tensor, draws: Draws) -> Tensor:
        """Return float32 images in [0, 1], changed by these parameters and by nothing else."""
        if images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
            raise DataError(
                "augmentation takes uint8 or float images of shape (N, C, H, W), "
                f"got {images.dtype} of shape {tuple(images.shape)}"
            )
        if len(draws.boxes) != len(images):
            raise DataError(f"{len(draws.boxes)} draws for {len(images)} images: draw one for each image")
        on_cpu, rows = images.device.type == "cpu", sample_rows(draws)
        fused = augment_fused_cpu(images, rows) if on_cpu else augment_fused(images, rows)
        if fused is not None:
            return fused
        return augment_rows(images, draws) if on_cpu else augment_batch(images, draws)

    def _changes_nothing(self) -> bool:
        colours = self.brightness or self.contrast or self.saturation or self.hue or self.gray
        return not (self._crops() or self.flip or colours)

    def _crops(self) -> bool:
        return self.min_scale < 1 or self.max_ratio > 1

    def _draw_boxes(self, chance: Tensor, height: int, width: int) -> Tensor:
        """Return (N, 4) boxes: the first try that fits, else the largest central box of an allowed ratio."""
        if not self._crops():
            return torch.tensor([0, 0, height, width]).expand(len(chance), 4)
        # In numpy: on so few numbers a call of torch costs several times the arithmetic.
        area, shape, place = np.split(chance.numpy(), [TRIES, 2 * TRIES], axis=1)
        area = height * width * (self.min_scale + (1 - self.min_scale) * area)
        ratio = np.exp((2 * shape - 1) * math.log(self.max_ratio))
        sizes = np.stack([np.sqrt(area / ratio), np.sqrt(area * ratio)], axis=2).round().astype(np.int64)
        frame = np.array([height, width])
        fits = ((sizes > 0) & (sizes <= frame)).all(axis=2)
        size = sizes[np.arange(len(sizes)), fits.argmax(axis=1)]
        corner = (place * (frame - size + 1)).astype(np.int64)
        central = np.array(_central_size(height, width, self.max_ratio))
        some = np.any(fits, axis=1, keepdims=True)
        corner = np.where(some, corner, (frame - central) // 2)
        return torch.from_numpy(np.concatenate([corner, np.where(some, size, central)], axis=1))

    def _draw_factors(self, chance: Tensor) -> Tensor:
        """Return (N, 4) factors, uniform around the one that changes nothing and never negative."""
        spread = torch.tensor(
            [self.brightness, self.contrast, self.saturation, self.hue], dtype=torch.float64
        )
        low, high = 1 - spread, 1 + spread
        low[:HUE].clamp_(min=0)
        low[HUE], high[HUE] = -self.hue, self.hue
        return low + (high - low) * chance


def augment_rows(images: Tensor, draws: Draws) -> Tensor:
    """Return the augmented images, one after the other: on a CPU each one then stays in the cache.

    Crops of bytes are rounded to whole levels, as torchvision's are; `augment_batch` rounds nothing.
    """
    size = (images.shape[-2], images.shape[-1])
    result = torch.empty(images.shape, dtype=torch.float32, device=images.device)
    boxes, flips = draws.boxes.tolist(), draws.flips.tolist()
    for row, ((top, left, height, width), flip) in enumerate(zip(boxes, flips, strict=True)):
        here = slice(row, row + 1)
        view = images[here, :, top : top + height, left : left + width]
        x = view.flip(-1) if flip else view
        if (height, width) != size:
            # torch resizes bytes fast with antialiasing and floats without; a box is never larger than the
            # output, so that it changes no pixel.
            levels = x.dtype == torch.uint8
            x = x if levels else x.float()
            x = interpolate(x, size=size, mode="bilinear", align_corners=False, antialias=levels)
        result[here] = unit_interval(x)
        jitter_(result[here], draws.order[here], draws.factors[here], draws.gray[here])
    return result


def sample_rows(draws: Draws) -> Tensor:
    """Return the draws as one table (N, 11), a row for each sample, as the fused kernels read it."""
    order = (draws.order << (2 * torch.arange(4))).sum(dim=1, keepdim=True)
    flips, gray = draws.flips.unsqueeze(1), draws.gray.unsqueeze(1)
    return torch.cat([draws.boxes, flips, order, draws.factors, gray], dim=1)


def augment_batch(images: Tensor, draws: Draws) -> Tensor:
    """Return the augmented images in few passes over the whole batch: what an accelerator likes."""
    height, width = images.shape[-2:]
    across, down = sampling_lines(draws.boxes, draws.flips, height, width)
    lines = upload(torch.cat([across, down], dim=1).float(), images.device)
    # One complex number for each pixel is a whole grid in one pass: x real, y imaginary.
    grid = torch.view_as_real(torch.complex(lines[:, None, :width], lines[:, width:, None]))
    x = grid_sample(unit_interval(images), grid, padding_mode="border", align_corners=False)
    return jitter_(x, draws.order, draws.factors, draws.gray)


def sampling_lines(boxes: Tensor, flips: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return where each column (N, W) and row (N, H) of the output lies in the input, in [-1, 1].

    A crop resized bilinearly is separable and reads only pixels of its box: positions are held inside it.
    """
    top, left, tall, wide = boxes.double().unsqueeze(2).unbind(dim=1)
    columns, rows = torch.arange(width) + 0.5, torch.arange(height) + 0.5
    across = (columns * wide / width - 0.5).clamp(min=0).minimum(wide - 1) + left
    down = (rows * tall / height - 0.5).clamp(min=0).minimum(tall - 1) + top
    across = torch.where(flips.unsqueeze(1), across.flip(1), across)
    return (2 * across + 1) / width - 1, (2 * down + 1) / height - 1


def unit_interval(images: Tensor) -> Tensor:
    """Return float32 images in [0, 1]; floats are taken to be there already."""
    # Dividing bytes gives float32 in a single pass.
    return images.float() if images.is_floating_point() else images / 255


def _central_size(height: int, width: int, max_ratio: float) -> tuple[int, int]:
    """Return (height, width) of the largest box whose ratio is allowed."""
    if width / height < 1 / max_ratio:
        return round(width * max_ratio), width
    if width / height > max_ratio:
        return height, round(height * max_ratio)
    return height, width
