"""A folder of domain folders, each a folder of class folders, as a set of domains."""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vicinal.data.domains import Domain, DomainSet, split_indices
from vicinal.data.images import Progress, decode_all, list_images, printable, visible
from vicinal.errors import DataError

LAYOUT = "arrange the images as <domain>/<class>/<image>"
MIN_DOMAINS = 2
MAX_NAMED = 5

# domain -> class -> image files
Tree = Mapping[str, Mapping[str, Sequence[Path]]]


@dataclass(frozen=True)
class _Item:
    """One image file and where it belongs."""

    domain: str
    label: int
    path: Path


def load_folder(
    root: Path,
    size: int,
    channels: int,
    *,
    val_fraction: float = 0.2,
    seed: int = 0,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> DomainSet:
    """Return the domains found in root/<domain>/<class>/<image>, named and ordered as the folders are.

    Any domain can become a target with all of its images, or a source split by `val_fraction`.
    """
    tree = scan_folder(root)
    classes = tuple(next(iter(tree.values())))
    listed = [
        _Item(domain, classes.index(label), path)
        for domain, folders in tree.items()
        for label in classes
        for path in folders[label]
    ]
    images, kept, bad = decode_all([item.path for item in listed], size, channels, skip_bad, progress)
    items = [listed[position] for position in kept]
    domains: dict[str, Domain] = {}
    for name in tree:
        mine = [position for position, item in enumerate(items) if item.domain == name]
        labels = torch.tensor([items[position].label for position in mine], dtype=torch.int64)
        _require_every_class(labels, classes, name)
        # The files were listed domain by domain, so a slice is enough and nothing is copied.
        part = slice(mine[0], mine[-1] + 1)
        paths = tuple(printable(item.path.relative_to(root)) for item in items[part])
        train, val = split_indices(labels, val_fraction, seed)
        domains[name] = Domain(name, images[part], labels, paths, train, val, torch.arange(len(labels)))
    return DomainSet(printable(Path(root.resolve().name)), classes, domains, tuple(bad))


def scan_folder(root: Path) -> Tree:
    """Return the image files of each class of each domain; the domains have the same classes."""
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise DataError(f"'{printable(root)}' {problem}: give a folder of domain folders")
    domains = _folders(root)
    if len(domains) < MIN_DOMAINS:
        found = f"only the domain '{next(iter(domains))}'" if domains else "no domain folders"
        raise DataError(f"'{printable(root)}' holds {found}: {LAYOUT}, with two domains or more")
    folders = {name: _class_folders(folder) for name, folder in domains.items()}
    _require_same_classes(folders)
    return {
        name: {label: list_images(folder) for label, folder in classes.items()}
        for name, classes in folders.items()
    }


def _class_folders(domain: Path) -> dict[str, Path]:
    """Return the class folders of a domain by name."""
    classes = _folders(domain)
    if not classes:
        raise DataError(f"domain folder '{printable(domain)}' holds no class folders: {LAYOUT}")
    return classes


def _folders(parent: Path) -> dict[str, Path]:
    """Return the visible folders in a folder by name, in natural order."""
    folders: dict[str, Path] = {}
    for folder in visible(parent):
        if not folder.is_dir():
            continue
        # Composed, because different systems spell one accented name with different bytes.
        name = unicodedata.normalize("NFC", printable(Path(folder.name)))
        if name in folders:
            raise DataError(f"'{printable(parent)}' holds two folders that both read '{name}': rename one")
        folders[name] = folder
    return folders


def _require_same_classes(domains: Mapping[str, Mapping[str, Path]]) -> None:
    """Raise, naming each class that some domains lack and who has or lacks it."""
    differences = []
    for label in dict.fromkeys(label for classes in domains.values() for label in classes):
        having = [name for name, classes in domains.items() if label in classes]
        lacking = [name for name in domains if name not in having]
        if lacking and len(having) < len(lacking):
            differences.append(f"'{label}' is only in {', '.join(having)}")
        elif lacking:
            differences.append(f"'{label}' is missing from {', '.join(lacking)}")
    if differences:
        more = len(differences) - MAX_NAMED
        tail = f"; and {more} more" if more > 0 else ""
        raise DataError(
            f"the domains must have the same classes, but {'; '.join(differences[:MAX_NAMED])}{tail}"
        )


def _require_every_class(labels: Tensor, classes: Sequence[str], domain: str) -> None:
    """Raise when skipping bad images has left a class without any."""
    for position, label in enumerate(classes):
        if not (labels == position).any():
            raise DataError(f"class '{label}' of domain '{domain}' has no readable image: add one")
