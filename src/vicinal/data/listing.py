"""Labelled image files, divided, as a set of decoded domains: where folders, tables and benchmarks meet."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vicinal.data.cache import Decoded, decode_cached
from vicinal.data.domains import Domain, DomainSet
from vicinal.data.files import natural_key, printable
from vicinal.data.images import Decoding, Progress
from vicinal.data.layouts import Item
from vicinal.errors import DataError


@dataclass(frozen=True, eq=False)
class Listing:
    """Every image of a data set with its domain, label and part; nothing is decoded yet."""

    name: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    items: tuple[Item, ...]
    target: Literal["all", "test"] = (
        "all"  # what a target is adapted to: everything, or the official test part
    )
    facts: Mapping[str, Any] = field(default_factory=dict)

    def of(self, domain: str) -> list[Item]:
        """Return a domain's items, by class and then by name: one order, however they lie on disk."""
        return in_order(item for item in self.items if item.domain == domain)


def in_order(items: Iterable[Item]) -> list[Item]:
    """Return items by class, then by file name, then by the folders above it."""

    def key(item: Item) -> tuple[int, Any, str]:
        return item.label, natural_key(item.file.name.rsplit("/", 1)[-1]), item.file.name

    return sorted(items, key=key)


def decode_listing(
    listing: Listing,
    how: Decoding,
    cache: Path,
    *,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> DomainSet:
    """Return the domains, memory-mapped from the cache, which is filled where it has to be."""
    domains: dict[str, Domain] = {}
    bad: list[str] = []
    done = 0
    for name in listing.domains:
        items = listing.of(name)
        decoded = decode_cached(
            [item.file for item in items],
            how,
            cache,
            skip_bad=skip_bad,
            progress=_shifted(progress, done, len(listing.items)),
        )
        domains[name] = _domain(name, items, decoded, listing)
        bad += decoded.bad
        done += len(items)
    facts = {**listing.facts, "size": how.size, "fit": how.fit}
    return DomainSet(listing.name, listing.classes, domains, tuple(bad), facts)


def _shifted(progress: Progress | None, done: int, total: int) -> Progress | None:
    """Return a domain's progress as a part of the whole's."""
    return None if progress is None else lambda here, _: progress(done + here, total)


def _domain(name: str, items: Sequence[Item], decoded: Decoded, listing: Listing) -> Domain:
    kept = [items[position] for position in decoded.kept]
    labels = torch.tensor([item.label for item in kept], dtype=torch.int64)
    _require_every_class(labels, listing.classes, name)
    train, val, test = (
        torch.tensor([k for k, item in enumerate(kept) if item.part == part], dtype=torch.int64)
        for part in ("train", "val", "test")
    )
    if listing.target == "all":
        test = torch.arange(len(kept))
    paths = tuple(printable(item.file.name) for item in kept)
    return Domain(name, decoded.images, labels, paths, train, val, test)


def _require_every_class(labels: Tensor, classes: Sequence[str], domain: str) -> None:
    """Raise when a class has no image left, for instance because all of them were bad."""
    present = set(labels.tolist())
    for position, label in enumerate(classes):
        if position not in present:
            raise DataError(f"class '{label}' of domain '{domain}' has no readable image: add one")
