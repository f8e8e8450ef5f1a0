"""Rotated MNIST and Fashion-MNIST: the same base images at each of several angles, one domain for each."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import rotate

from vicinal.data.arrays import chunk_length, fitted, to_bytes
from vicinal.data.domains import Domain, DomainSet
from vicinal.data.idx import LabelledArrays
from vicinal.errors import ConfigError, DataError

FULL_TURN = 360
SIDE = 28  # of the base images of MNIST and its kin


@dataclass(frozen=True)
class RotatedOptions:
    """Angles counter-clockwise in degrees, and how many base images each domain has.

    `train` and `val` come from the base's training part, `test` from its test part. None takes all that are
    left: one of `train` and `val` may be None, not both. `base_seed` decides which base images are chosen.
    """

    angles: tuple[int, ...] = (0, 15, 30, 45, 60, 75, 90)
    train: int | None = 4000
    val: int | None = 1000
    test: int | None = None
    base_seed: int = 0

    def __post_init__(self) -> None:
        if not self.angles or len(set(self.angles)) < len(self.angles):
            raise ConfigError(f"angles must be given, each once, not {self.angles}")
        for angle in self.angles:
            if not (isinstance(angle, int) and 0 <= angle < FULL_TURN):
                raise ConfigError(f"angles must be whole degrees from 0 to 359, not {angle}")
        if self.train is None and self.val is None:
            raise ConfigError("train and val cannot both be all that is left: give a number for one of them")
        for name, count, least in (("train", self.train, 1), ("val", self.val, 0), ("test", self.test, 1)):
            if count is not None and count < least:
                raise ConfigError(f"{name} must be at least {least} images a domain, or None, not {count}")


def load_rotated(
    name: str,
    base: LabelledArrays,
    classes: tuple[str, ...],
    options: RotatedOptions,
    size: int = SIDE,
    channels: int = 1,
    seed: int = 0,
) -> DomainSet:
    """Return one domain for each angle: the same base images, turned counter-clockwise, corners black.

    The base images are chosen by `options.base_seed`, those of the training part divided into train and val
    by `seed`: an image that is trained on at one angle is never validated or tested on at another. They are
    brought to `size` before they are turned.
    """
    train, val, test = choose_base(len(base.train_labels), len(base.test_labels), options, seed)
    pool = torch.cat([train, val]).sort().values
    upright = fitted(
        torch.cat([base.train_images[pool], base.test_images[test]]),
        size,
        base.train_images.shape[1],
    )
    labels = torch.cat([base.train_labels[pool], base.test_labels[test]])
    paths = tuple([f"train/{i}" for i in pool.tolist()] + [f"test/{i}" for i in test.tolist()])
    parts = (
        torch.searchsorted(pool, train),
        torch.searchsorted(pool, val),
        torch.arange(len(pool), len(pool) + len(test)),
    )
    domains = {
        str(angle): Domain(str(angle), _turned(upright, angle, channels), labels, paths, *parts)
        for angle in options.angles
    }
    facts = {"options": asdict(options), "split_seed": seed, "counts": [len(part) for part in parts]}
    return DomainSet(name, classes, domains, facts=facts)


def choose_base(
    train_count: int, test_count: int, options: RotatedOptions, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sorted positions in the base: train and val in its training part, test in its test part.

    Plain permutations: each class has its share of the base in expectation, not exactly.
    """
    train_size, val_size = _sizes(train_count, options)
    pool = _chosen(train_count, train_size + val_size, options.base_seed)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
    train, val = pool[order[:train_size]].sort().values, pool[order[train_size:]].sort().values
    test_size = test_count if options.test is None else options.test
    if test_size > test_count:
        raise DataError(
            f"test asks for {test_size} images a domain, the base has {test_count}: ask for fewer"
        )
    return train, val, _chosen(test_count, test_size, options.base_seed).sort().values


def _sizes(available: int, options: RotatedOptions) -> tuple[int, int]:
    """Return how many of the base's training images to train and to validate on."""
    train, val = options.train, options.val
    if train is None:
        train = available - (val or 0)
    if val is None:
        val = available - train
    if train < 1 or val < 0 or train + val > available:
        asked = f"train={options.train} and val={options.val}"
        raise DataError(f"{asked} ask for more than the base's {available} training images: ask for fewer")
    return train, val


def _chosen(available: int, count: int, seed: int) -> Tensor:
    """Return the positions of `count` of the images, in random order."""
    return torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:count]


def _turned(images: Tensor, angle: int, channels: int) -> Tensor:
    """Return uint8 images turned counter-clockwise by `angle` degrees, with that many channels."""
    turned = torch.empty_like(images)
    step = chunk_length(images.shape[1], images.shape[-1])
    for start in range(0, len(images), step):
        # As floats: in bytes, torchvision would round inside. And without `fill`, which is black too but
        # weighs the rim twice and dims it.
        chunk = images[start : start + step].float()
        floats = rotate(chunk, float(angle), interpolation=InterpolationMode.BILINEAR)
        turned[start : start + step] = to_bytes(floats)
    return fitted(turned, images.shape[-1], channels)
