"""A folder of domain folders, each a folder of class folders, as a set of domains."""

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from vicinal.data.files import list_images, plain_file, printable, visible, walk
from vicinal.data.layouts import Item
from vicinal.data.listing import Listing
from vicinal.data.splits import stored
from vicinal.errors import DataError

LAYOUT = "arrange the images as <domain>/<class>/<image>"
MIN_DOMAINS = 2
MAX_NAMED = 5

# domain -> class -> image files
Tree = Mapping[str, Mapping[str, Sequence[Path]]]


def list_folder(root: Path, *, val_fraction: float = 0.2, seed: int = 0) -> Listing:
    """Return the images found in root/<domain>/<class>/<image>, named and ordered as the folders are.

    Any domain can become a target with all of its images, or a source split by `val_fraction`.
    """
    tree = scan_folder(root)
    classes = tuple(next(iter(tree.values())))
    items = [
        Item(domain, classes.index(label), plain_file(path, root))
        for domain, folders in tree.items()
        for label in classes
        for path in folders[label]
    ]
    facts = {"layout": "folder", "split": f"stored, {val_fraction:g} of every class for validation"}
    name = printable(Path(root.resolve().name))
    return Listing(name, classes, tuple(tree), stored(root, items, val_fraction, seed), facts=facts)


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
    require_same_classes(folders)
    _refuse_empty(folders)
    return {
        name: {label: list_images(folder) for label, folder in classes.items()}
        for name, classes in folders.items()
    }


def _refuse_empty(domains: Mapping[str, Mapping[str, Path]]) -> None:
    """Raise for the first class that has no images in any domain: perhaps its folders are no classes."""
    for label in next(iter(domains.values())):
        places = [classes[label] for classes in domains.values()]
        if not any(True for place in places for _ in walk(place)):
            raise DataError(
                f"class '{label}' has no images in any domain, as in '{printable(places[0])}': put files "
                f"such as .jpg or .png there, or remove the folder '{label}' of every domain"
            )


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


def require_same_classes(domains: Mapping[str, Collection[str]]) -> None:
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
