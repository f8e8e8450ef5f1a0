"""Rotated digits: a small set of domains that needs no download, from scikit-learn's handwritten digits."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import rotate

from vicinal.data.domains import Domain, DomainSet, split_indices

ANGLES = (0, 15, 30, 45, 60, 75, 90)
SOURCE_DIGITS = 1100
VAL_FRACTION = 0.2
MAX_INK = 16.0


def load_digits_domains(size: int = 16, seed: int = 0, angles: Sequence[int] = ANGLES) -> DomainSet:
    """Return one domain for each angle, each holding all 1,797 digits turned counter-clockwise by it.

    The digits are split once, before they are turned: 1,100 for sources (80% to train, 20% to validate) and
    697 for targets, the same ones in every domain. So no digit is trained on at one angle and tested at
    another.
    """
    pixels, labels = _base_digits()
    upright = interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False)
    train, val, test = split_digits(labels, seed)
    paths = tuple(f"digits/{position}" for position in range(len(labels)))
    domains = {
        str(angle): Domain(str(angle), _turned(upright, angle), labels, paths, train, val, test)
        for angle in angles
    }
    return DomainSet("digits", tuple(str(digit) for digit in range(10)), domains)


def split_digits(labels: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sorted positions of the digits to train on, to validate on and to test on."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    sources, test = order[:SOURCE_DIGITS].sort().values, order[SOURCE_DIGITS:].sort().values
    train, val = split_indices(labels[sources], VAL_FRACTION, seed)
    return sources[train], sources[val], test


def _base_digits() -> tuple[Tensor, Tensor]:
    """Return the digits as (1797, 1, 8, 8) in [0, 1], and their labels."""
    # Here, since it takes a second to import and every command and worker would pay for it.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images).float().unsqueeze(1) / MAX_INK
    return pixels, torch.from_numpy(bunch.target).long()


def _turned(images: Tensor, angle: int) -> Tensor:
    """Return the images turned counter-clockwise by `angle` degrees, as uint8; corners are black."""
    # Without `fill`, which is black too but weighs the rim twice and dims it.
    turned: Tensor = rotate(images, float(angle), interpolation=InterpolationMode.BILINEAR)
    return (turned * 255).round().clamp(0, 255).to(torch.uint8)
