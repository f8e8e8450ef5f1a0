"""Labelled domains, and the roles they play: sources with labels, targets without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vicinal.data.pixels import Images, Pixels, require_pixels
from vicinal.errors import ConfigError, DataError, UnknownNameError

MIN_SOURCES = 2


# eq=False throughout: comparing tensors with == has no single truth value, so equality is identity.
@dataclass(frozen=True, eq=False)
class Domain:
    """One labelled domain, decoded: uint8 (N, C, H, W), in memory or memory-mapped.

    `train` and `val` are used when the domain is a source, `test` when it is a target; all three hold
    positions in `images`. `paths` says where each image came from, relative to the data root.
    """

    name: str
    images: Tensor
    labels: Tensor
    paths: tuple[str, ...]
    train: Tensor
    val: Tensor
    test: Tensor

    def __post_init__(self) -> None:
        require_pixels(self.images, f"domain '{self.name}'")
        if not len(self.images) == len(self.labels) == len(self.paths):
            counts = f"{len(self.images)} images, {len(self.labels)} labels, {len(self.paths)} paths"
            raise DataError(f"domain '{self.name}': {counts}; give one label and one path for each image")


@dataclass(frozen=True, eq=False)
class DomainSet:
    """All domains of one data set, in order, with the classes they share.

    `bad` lists the images that were skipped, each as "path: why"; `facts` is what a record must say of the
    data: layout, split rule, options.
    """

    name: str
    classes: tuple[str, ...]
    domains: Mapping[str, Domain]
    bad: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images and their labels: uint8 (N, C, H, W) and int64 (N,)."""

    images: Images
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class SourceDomain:
    """A domain to train on. `val` is empty when no class has two images."""

    name: str
    train: LabelledImages
    val: LabelledImages


@dataclass(frozen=True, eq=False)
class TargetDomain:
    """A domain to adapt to. It has no labels, so that no method can reach them."""

    name: str
    images: Images
    paths: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Roles:
    """Sources, targets and, apart from both, the targets' labels.

    `answers` are for metrics only: nothing that trains or adapts may take them, nor a `Roles`.
    """

    sources: tuple[SourceDomain, ...]
    targets: tuple[TargetDomain, ...]
    classes: tuple[str, ...]
    answers: Mapping[str, Tensor]
    bad: tuple[str, ...] = ()


def assign_roles(
    data: DomainSet, targets: Sequence[str], min_sources: int = MIN_SOURCES, sources: Sequence[str] = ()
) -> Roles:
    """Return the named domains as targets, in the order given, and all others, or those named, as sources."""
    for name in (*targets, *sources):
        if name not in data.domains:
            raise UnknownNameError("domain", name, data.domains)
    names = tuple(dict.fromkeys(targets))
    # A domain without training images, as a corrupted test set is, is there to be adapted to.
    rest = [domain for name, domain in data.domains.items() if name not in names and len(domain.train)]
    unfit = [name for name in sources if name not in {domain.name for domain in rest}]
    if unfit:
        why = "it is a target" if unfit[0] in names else "it has no training images"
        raise DataError(f"'{unfit[0]}' of '{data.name}' cannot be a source: {why}")
    used = tuple(_as_source(domain) for domain in rest if not sources or domain.name in sources)
    if len(used) < min_sources:
        raise DataError(
            f"'{data.name}' has {len(data.domains)} domains, {len(names)} of them targets and {len(used)} "
            "sources: leave at least two source domains, so that a shift can be simulated"
        )
    chosen = [data.domains[name] for name in names]
    for domain in chosen:
        if not len(domain.test):
            raise DataError(f"domain '{domain.name}' of '{data.name}' has no test images to adapt to")
    answers = {domain.name: domain.labels[domain.test] for domain in chosen}
    return Roles(used, tuple(_as_target(domain) for domain in chosen), data.classes, answers, data.bad)


def _as_source(domain: Domain) -> SourceDomain:
    """Return the domain's training and validation parts, with labels."""
    train, val = (
        LabelledImages(Pixels(domain.images, part), domain.labels[part])
        for part in (domain.train, domain.val)
    )
    return SourceDomain(domain.name, train, val)


def _as_target(domain: Domain) -> TargetDomain:
    """Return the domain's test part, without labels."""
    paths = tuple(domain.paths[position] for position in domain.test.tolist())
    return TargetDomain(domain.name, Pixels(domain.images, domain.test), paths)


def split_indices(labels: Tensor, val_fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the sorted positions of a training and a validation part, drawn class by class.

    A class with two images or more has at least one in each part (in training alone when the fraction is 0);
    a class with one image is in training.
    """
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"the validation fraction must be at least 0 and below 1, not {val_fraction}")
    generator = torch.Generator().manual_seed(seed)
    is_val = torch.zeros(len(labels), dtype=torch.bool)
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().squeeze(1)
        count = _val_count(len(members), val_fraction)
        is_val[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return (~is_val).nonzero().squeeze(1), is_val.nonzero().squeeze(1)


def _val_count(count: int, val_fraction: float) -> int:
    """Return how many of one class's images go to validation."""
    if val_fraction == 0:
        return 0
    return min(count - 1, max(1, round(val_fraction * count)))
