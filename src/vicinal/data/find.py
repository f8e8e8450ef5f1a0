"""Where a data set lies: what of it is found in the data folders, and what to put where."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from vicinal.data.entries import Arrays, BuiltIn, DatasetEntry, Tree
from vicinal.data.files import ImageFile, list_archive, list_tree, printable, visible
from vicinal.data.layouts import Item, Matched, counts, match, plain
from vicinal.data.splits import apply_lists, find_lists

OFFICIAL = "official lists"


def needs_lists(entry: DatasetEntry) -> bool:
    """Return whether a data set is nothing without its lists."""
    lists = entry.source.split.lists if isinstance(entry.source, Tree) else None
    return lists is not None and lists.only and lists.needed


def data_dirs(given: Path | None = None) -> list[Path]:
    """Return the data folders: the one given, else those in VICINAL_DATA, else ~/vicinal-data."""
    if given is not None:
        return [given]
    named = [Path(part) for part in os.environ.get("VICINAL_DATA", "").split(os.pathsep) if part]
    return named or [Path.home() / "vicinal-data"]


@dataclass(frozen=True, eq=False)
class FoundTree:
    """The images of a data set on disk, with their official parts where lists were found."""

    root: Path
    layout: str
    items: tuple[Item, ...]
    split: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Status:
    """What there is of a data set: "built in", "found", "incomplete" or "missing"."""

    entry: DatasetEntry
    state: str
    where: str = ""
    layout: str = ""
    split: str = ""
    found: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def status(entry: DatasetEntry, dirs: Sequence[Path]) -> Status:
    """Return what there is of a data set in the data folders, counted, not decoded."""
    if isinstance(entry.source, BuiltIn):
        return Status(entry, "built in", found=dict(entry.counts))
    if isinstance(entry.source, Arrays):
        folder = entry.source.find(places(entry, dirs))
        if folder is None:
            return Status(entry, "missing")
        lacking = entry.source.lacks(places(entry, dirs))
        state = "incomplete" if lacking else "found"
        lines, have = ((lacking,), {}) if lacking else ((), dict(entry.counts))
        return Status(entry, state, printable(folder), "arrays", found=have, notes=lines)
    found = find_tree(entry, dirs)
    if found is None:
        return Status(entry, "missing")
    have = {domain: sum(row) for domain, row in counts(found.items, entry.names).items()}
    notes = list(found.notes)
    short = any(have[domain] < entry.counts[domain] for domain in entry.domains)
    state = "incomplete" if short or (needs_lists(entry) and found.split != OFFICIAL) else "found"
    for version, other in entry.other_counts.items():
        if have == dict(other):
            state, notes = "found", [*notes, f"the counts are those of the {version}"]
    return Status(entry, state, printable(found.root), found.layout, found.split, have, tuple(notes))


def places(entry: DatasetEntry, dirs: Sequence[Path]) -> list[Path]:
    """Return the folders a data set may lie in: its own in the data folders, then these themselves."""
    source = entry.source
    if isinstance(source, BuiltIn):
        return []
    wanted = {plain(name) for name in source.folders}
    named = [
        child
        for directory in dirs
        if directory.is_dir()
        for child in visible(directory)
        if plain(child.name) in wanted and child.is_dir()
    ]
    system = [Path(name) for name in source.elsewhere] if isinstance(source, Arrays) else []
    return [*named, *(directory for directory in dirs if directory.is_dir()), *system]


def find_tree(entry: DatasetEntry, dirs: Sequence[Path]) -> FoundTree | None:
    """Return the place in the data folders that has most of a data set's images."""
    tree = entry.source
    assert isinstance(tree, Tree)
    candidates = [
        (root, matched, directory)
        for directory in dirs
        if directory.is_dir()
        for root, files in _candidates(entry, tree, directory)
        if (matched := _match(entry, tree, root, files)) is not None
    ]
    if not candidates:
        return None
    root, matched, directory = max(candidates, key=lambda found: len(found[1].items))
    return _with_parts(entry, tree, root, matched, directory)


def _candidates(
    entry: DatasetEntry, tree: Tree, directory: Path
) -> Iterator[tuple[Path, Sequence[ImageFile]]]:
    """Yield folders that may hold the data set, each with the images below it."""
    for place in places(entry, [directory]):
        if place != directory:
            yield place, list_tree(place)
    # The data folder itself, when it was given as the data set's own: not every image of every other set.
    inside = {plain(child.name) for child in visible(directory) if child.is_dir()}
    if inside & (set(entry.names.domain_of()) | {"kfold", "images"}):
        yield directory, list_tree(directory)
    archives = [
        child for child in visible(directory) if any(fnmatch(child.name, name) for name in tree.archives)
    ]
    if archives:
        yield directory, [file for archive in archives for file in list_archive(archive)]


def _match(entry: DatasetEntry, tree: Tree, root: Path, files: Sequence[ImageFile]) -> Matched | None:
    matched = match(tree.layouts, files, entry.names)
    if matched is None and tree.annotations is not None:
        items = tree.annotations.items(root, files, entry.names)
        return Matched(tree.annotations.name, "", items) if items else None
    return matched


def _with_parts(entry: DatasetEntry, tree: Tree, root: Path, matched: Matched, directory: Path) -> FoundTree:
    """Return the images with the parts of the official lists, if the rule has some and they are there."""
    notes = []
    if matched.strangers:
        notes.append(f"{matched.strangers} other images were left out, as {matched.examples[0]}")
    lists, share = tree.split.lists, f"seeded, {tree.split.val_fraction:g} of every class for validation"
    if lists is None:
        return FoundTree(root, matched.layout, matched.items, share, tuple(notes))
    prefix = PurePosixPath(matched.prefix)  # pacs/images of Dassl's archive: the lists are in pacs/splits
    above = [root / step for step in (prefix, *prefix.parents)]
    folder = find_lists(lists, [*above, directory], entry.names)
    if folder is None:
        wanted = lists.file.format(domain=entry.domains[0], part=next(iter(lists.parts)))
        otherwise = "" if needs_lists(entry) else ", or the split is seeded"
        notes.append(
            f"the official lists ({wanted}, ...) were not found: put them into "
            f"'{printable(directory / lists.folders[0])}'{otherwise}"
        )
        return FoundTree(root, matched.layout, matched.items, share, tuple(notes))
    items, more = apply_lists(lists, folder, matched.items, entry.names)
    return FoundTree(root, matched.layout, items, OFFICIAL, (*notes, *more))


def how_to_get(entry: DatasetEntry, directory: Path) -> str:
    """Return one line that says what to put where."""
    source = entry.source
    if isinstance(source, BuiltIn):
        return f"{entry.name} comes with vicinal"
    folder = printable(directory / source.folders[0])
    if isinstance(source, Arrays):
        what = f"put {', '.join(source.files)} into '{folder}'"
    else:
        example = source.layouts[0].template.format(
            domain=entry.domains[0], label=entry.classes[0], file="*.jpg"
        )
        what = f"put the images into '{folder}' as {example}"
        if source.split.lists is not None and needs_lists(entry):
            what += (
                f", and the lists ({source.split.lists.file}) into '{folder}/{source.split.lists.folders[0]}'"
            )
    online = f"vicinal data get {entry.name}, or " if entry.downloads else ""
    return f"{online}{what}; from {entry.home}"
