"""Every image of a data set decoded, counted and compared with what the catalog says."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vicinal.data.cache import default_cache
from vicinal.data.catalog import DATASETS
from vicinal.data.domains import Domain, DomainSet
from vicinal.data.entries import DatasetEntry, Tree
from vicinal.data.find import data_dirs, find_tree
from vicinal.data.images import Decoding, Progress, decode_in_order
from vicinal.data.layouts import Item
from vicinal.data.listing import Listing
from vicinal.data.load import list_entry, list_own, load_dataset

# Small: a check must decode every pixel, not keep them.
CHECK_SIZE = 32


@dataclass(frozen=True)
class DomainCheck:
    """What was found of one domain: images of each class, and the sizes of its parts."""

    name: str
    found: tuple[int, ...]
    expected: tuple[int, ...] | None  # of each class, or of all together where the catalog has no more
    parts: tuple[int, int, int]  # train, validation, test

    @property
    def complete(self) -> bool:
        """Whether the counts are the catalog's."""
        if self.expected is None:
            return True
        return self.found == self.expected or self.expected == (sum(self.found),)


@dataclass(frozen=True)
class Check:
    """The outcome for a whole data set."""

    name: str
    classes: tuple[str, ...]
    domains: tuple[DomainCheck, ...]
    bad: tuple[str, ...]
    notes: tuple[str, ...]
    split: str

    @property
    def sound(self) -> bool:
        """Whether every image can be read and every count agrees."""
        return not self.bad and all(domain.complete for domain in self.domains)


def check(name_or_path: str, data_dir: Path | None = None, progress: Progress | None = None) -> Check:
    """Return the counts of a data set and every image that cannot be decoded."""
    entry = DATASETS[name_or_path] if name_or_path in DATASETS else None  # noqa: SIM401
    if entry is None:
        return _check_listing(list_own(name_or_path), None, (), progress)
    dirs = data_dirs(data_dir)
    if isinstance(entry.source, Tree):
        listing, found = list_entry(entry, dirs), find_tree(entry, dirs)
        return _check_listing(listing, entry, () if found is None else found.notes, progress)
    data = load_dataset(name_or_path, data_dir=data_dir, cache=default_cache(), progress=progress)
    return _check_arrays(data, entry)


def _check_listing(
    listing: Listing, entry: DatasetEntry | None, notes: Sequence[str], progress: Progress | None
) -> Check:
    """Decode every image of a listing; the bad ones count as not found."""
    how, bad, sound = Decoding(CHECK_SIZE, 3), [], []
    files = [item.file for item in listing.items]
    for position, result in enumerate(decode_in_order(files, how)):
        if isinstance(result, Tensor):
            sound.append(listing.items[position])
        else:
            bad.append(str(result))
        if progress is not None:
            progress(position + 1, len(files))
    domains = tuple(_domain_check(name, sound, listing, entry) for name in listing.domains)
    split = str(listing.facts.get("split", ""))
    return Check(listing.name, listing.classes, domains, tuple(bad), tuple(notes), split)


def _domain_check(
    name: str, items: Sequence[Item], listing: Listing, entry: DatasetEntry | None
) -> DomainCheck:
    mine = [item for item in items if item.domain == name]
    labels, parts = Counter(item.label for item in mine), Counter(item.part for item in mine)
    test = len(mine) if listing.target == "all" else parts["test"]
    found = tuple(labels[label] for label in range(len(listing.classes)))
    return DomainCheck(name, found, _expected(entry, name, sum(found)), (parts["train"], parts["val"], test))


def _expected(entry: DatasetEntry | None, name: str, found: int) -> tuple[int, ...] | None:
    """Return what the catalog says: the counts of each class if it has them, else those of a version."""
    if entry is None or name not in entry.counts:
        return None
    if name in entry.class_counts:
        return entry.class_counts[name]
    versions = [entry.counts[name], *(other[name] for other in entry.other_counts.values())]
    return (found,) if found in versions else (versions[0],)


def _check_arrays(data: DomainSet, entry: DatasetEntry) -> Check:
    domains = tuple(_array_check(domain, len(data.classes), entry) for domain in data.domains.values())
    return Check(data.name, data.classes, domains, data.bad, (), str(data.facts.get("split", "its own")))


def _array_check(domain: Domain, classes: int, entry: DatasetEntry) -> DomainCheck:
    found = tuple(domain.labels.bincount(minlength=classes).tolist())
    parts = (len(domain.train), len(domain.val), len(domain.test))
    return DomainCheck(domain.name, found, _expected(entry, domain.name, sum(found)), parts)
