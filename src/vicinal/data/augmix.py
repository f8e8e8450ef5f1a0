"""AugMix for test time: several chains of simple operations, mixed with each other and with the image."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample
from torchvision.transforms.v2 import functional as vision

from vicinal.data.augment import Augment, Draws, unit_interval
from vicinal.data.colour import upload
from vicinal.errors import ConfigError, DataError

# The names and their order are torchvision's v2.AugMix(all_ops=False).
OPERATIONS = (
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)
SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE, POSTERIZE, SOLARIZE, AUTOCONTRAST, EQUALIZE = range(9)
NOTHING = -1
BINS = 10
LONGEST_CHAIN = 3
# MEMO crops and flips before it mixes; the range of areas is RandomResizedCrop's own.
MEMO_CROP = Augment(min_scale=0.08)
# On a CPU so many samples at a time, with all their chains: enough to share the cost of each call.
CHUNK = 8


class MixDraws(NamedTuple):
    """The random parameters of a batch, on the CPU."""

    crop: Draws | None
    operations: (
        Tensor  # (N, width, longest chain) int64: a place in OPERATIONS, or NOTHING past the chain's end
    )
    magnitudes: Tensor  # (N, width, longest chain) float64, with their sign
    weights: Tensor  # (N, 1 + width) float64, sum 1: of the image itself, then of each chain


@dataclass(frozen=True)
class AugMix:
    """Mixtures m x + (1 - m) sum_i w_i chain_i(x) with m from Beta(alpha, alpha), w from Dirichlet(alpha).

    Operations, magnitudes and distributions are those of torchvision's v2.AugMix with all_ops=False, drawn
    for each sample alone. Departs from torchvision: bytes are turned into floats first, so that nothing is
    rounded between the operations.
    """

    severity: int = 3
    width: int = 3
    depth: int = -1
    alpha: float = 1.0
    crop: Augment | None = MEMO_CROP

    def __post_init__(self) -> None:
        if not 1 <= self.severity <= BINS:
            raise ConfigError(f"severity must be between 1 and {BINS}, not {self.severity}")
        if self.width < 1:
            raise ConfigError(f"width must be at least 1 chain, not {self.width}")
        if self.depth == 0:
            raise ConfigError("depth must be at least 1, or -1 for a random depth of 1 to 3, not 0")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"alpha must be above 0 and finite, not {self.alpha}")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return the batch with draws of its own for each sample; floats keep their dtype."""
        y = self.apply(x, self.draw(len(x), x.shape[-2], x.shape[-1], generator))
        return y.to(x.dtype) if x.is_floating_point() else y

    def draw(self, count: int, height: int, width: int, generator: torch.Generator) -> MixDraws:
        """Return parameters for so many images of this size; the generator alone decides them."""
        crop = None if self.crop is None else self.crop.draw(count, height, width, generator)
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        # torch's public Beta and Dirichlet take no generator; numpy's do.
        chance = np.random.default_rng(int(seed))
        longest = self.depth if self.depth > 0 else LONGEST_CHAIN
        shape = (count, self.width, longest)
        operations = chance.integers(len(OPERATIONS), size=shape)
        if self.depth < 1:
            depths = chance.integers(1, LONGEST_CHAIN + 1, size=(count, self.width, 1))
            operations = np.where(np.arange(longest) < depths, operations, NOTHING)
        signs = np.where(chance.random(shape) <= 0.5, -1.0, 1.0)
        signs[operations >= POSTERIZE] = 1
        levels = chance.integers(self.severity, size=shape)
        magnitudes = signs * magnitude_table(height, width).numpy()[operations, levels]
        keep = chance.beta(self.alpha, self.alpha, size=(count, 1))
        chains = chance.dirichlet([self.alpha] * self.width, size=count)
        weights = np.concatenate([keep, (1 - keep) * chains], axis=1)
        return MixDraws(crop, torch.from_numpy(operations), *map(torch.from_numpy, (magnitudes, weights)))

    @torch.no_grad()
    def apply(self, images: Tensor, draws: MixDraws) -> Tensor:
        """Return float32 images in [0, 1], changed by these parameters and by nothing else."""
        if images.ndim != 4 or images.shape[1] not in (1, 3):
            raise DataError(
                f"AugMix takes images of shape (N, 1 or 3, H, W), got shape {tuple(images.shape)}: "
                "convert them first"
            )
        if len(draws.weights) != len(images):
            raise DataError(f"{len(draws.weights)} draws for {len(images)} images: draw one for each image")
        crop = self.crop or Augment()
        x = unit_interval(images) if draws.crop is None else crop.apply(images, draws.crop)
        chunk = CHUNK if x.device.type == "cpu" else max(len(x), 1)
        parts = [
            _mix(x[start : start + chunk], *(part[start : start + chunk] for part in draws[1:]))
            for start in range(0, len(x), chunk)
        ]
        return torch.cat(parts) if parts else x


def magnitude_table(height: int, width: int) -> Tensor:
    """Return the magnitude (operations, bins) of each operation; the unused rows are zero."""
    table = torch.zeros(len(OPERATIONS), BINS, dtype=torch.float64)
    table[[SHEAR_X, SHEAR_Y]] = torch.linspace(0, 0.3, BINS).double()
    # Whole pixels, as torchvision cuts them.
    table[TRANSLATE_X] = torch.linspace(0, width / 3, BINS).trunc()
    table[TRANSLATE_Y] = torch.linspace(0, height / 3, BINS).trunc()
    table[ROTATE] = torch.linspace(0, 30, BINS)
    table[POSTERIZE] = (4 - torch.arange(BINS) / ((BINS - 1) / 4)).round()
    table[SOLARIZE] = torch.linspace(1, 0, BINS)
    return table


def _mix(x: Tensor, operations: Tensor, magnitudes: Tensor, weights: Tensor) -> Tensor:
    """Return the mixtures; all chains of all samples advance together, step by step."""
    count, width, longest = operations.shape
    chains = x.repeat_interleave(width, dim=0)
    run_steps_(chains, operations.reshape(-1, longest), magnitudes.reshape(-1, longest))
    shares = upload(weights.float(), x.device).view(count, 1 + width, 1, 1, 1)
    mixed = (chains.view(count, width, *x.shape[1:]) * shares[:, 1:]).sum(dim=1)
    return mixed.addcmul_(x, shares[:, 0])


def run_steps_(x: Tensor, operations: Tensor, magnitudes: Tensor) -> None:
    """Run the operations (N, steps) of each image, in place; images with the same kind of one go together."""
    # The five geometric operations are one: they differ in their matrices alone.
    kinds = torch.where((operations >= 0) & (operations < POSTERIZE), ROTATE, operations)
    maps = inverse_maps(operations, magnitudes, x.shape[-2], x.shape[-1])
    numbers = upload(torch.cat([maps, magnitudes.unsqueeze(2)], dim=2).float(), x.device)
    groups = [
        (step, kind, (kinds[:, step] == kind).nonzero().flatten())
        for step in range(operations.shape[1])
        for kind in RUN
    ]
    # Uploaded together: many small uploads would cost more than the operations.
    everything = upload(torch.cat([samples for _, _, samples in groups]), x.device)
    start = 0
    for step, kind, samples in groups:
        rows = everything[start : start + len(samples)]
        start += len(samples)
        if len(samples):
            x[rows] = RUN[kind](x[rows], numbers[rows, step])


def inverse_maps(operations: Tensor, magnitudes: Tensor, height: int, width: int) -> Tensor:
    """Return (..., 6), a b c d e f: output (x, y) reads input (a x + b y + c, d x + e y + f).

    Pixels from the centre of the image. A shear keeps the upper left corner, a rotation keeps the centre and
    turns counter-clockwise.
    """

    def only(operation: int) -> Tensor:
        return torch.where(operations == operation, magnitudes, 0)

    angle = torch.deg2rad(only(ROTATE))
    across, down = only(SHEAR_X), only(SHEAR_Y)
    rows = (
        angle.cos(),
        across - angle.sin(),
        across * height / 2 - only(TRANSLATE_X),
        down + angle.sin(),
        angle.cos(),
        down * width / 2 - only(TRANSLATE_Y),
    )
    return torch.stack(rows, dim=-1)


def _warp(x: Tensor, numbers: Tensor) -> Tensor:
    """Return the images under maps of their own, bilinear, black outside."""
    height, width = x.shape[-2:]
    columns = torch.arange(width, device=x.device) + (0.5 - width / 2)
    rows = torch.arange(height, device=x.device) + (0.5 - height / 2)
    a, b, c, d, e, f = numbers[:, :6].unsqueeze(2).unbind(dim=1)
    # Complex numbers, x real and y imaginary, in units of half the image: one sum makes the whole grid.
    along = torch.complex((a * columns + c) * (2 / width), (d * columns + f) * (2 / height))
    beside = torch.complex(b * rows * (2 / width), e * rows * (2 / height))
    grid = torch.view_as_real(along.unsqueeze(1) + beside.unsqueeze(2))
    return grid_sample(x, grid, padding_mode="zeros", align_corners=False)


def _posterize(x: Tensor, numbers: Tensor) -> Tensor:
    """Return the images with 2^bits levels, of [0, 1) as torchvision counts them for floats."""
    levels = torch.exp2(numbers[:, 6]).view(-1, 1, 1, 1)
    return (x * levels).floor_().clamp_(min=0).minimum(levels - 1).div_(levels)


def _solarize(x: Tensor, numbers: Tensor) -> Tensor:
    """Return the images with everything from the threshold on inverted."""
    return torch.where(x >= numbers[:, 6].view(-1, 1, 1, 1), 1 - x, x)


def _autocontrast(x: Tensor, _: Tensor) -> Tensor:
    """Return the images with each channel stretched to [0, 1]."""
    stretched: Tensor = vision.autocontrast(x)
    return stretched


def _equalize(x: Tensor, _: Tensor) -> Tensor:
    """Return the images with a flat histogram in each channel."""
    flat: Tensor = vision.equalize(x)
    return flat


# Each takes the images and (N, 7): the map, if the operation is geometric, and the magnitude.
RUN: dict[int, Callable[[Tensor, Tensor], Any]] = {
    ROTATE: _warp,
    POSTERIZE: _posterize,
    SOLARIZE: _solarize,
    AUTOCONTRAST: _autocontrast,
    EQUALIZE: _equalize,
}
