"""How a domain's images are divided: by official lists, by a stored file, or by a seeded share."""

import csv
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

import torch

from vicinal.data.domains import split_indices
from vicinal.data.files import printable
from vicinal.data.layouts import Item, Names, plain
from vicinal.errors import ConfigError, DataError

STORED = Path(".vicinal")


@dataclass(frozen=True)
class Lists:
    """Official split lists: text files with a line "path label" for each image.

    Of a path the last three steps count: domain, class and file. `only` says that images which no list names
    are not part of the data set.
    """

    file: str  # "{domain}_{part}_kfold.txt"
    parts: Mapping[str, str]  # what {part} is -> "train", "val" or "test"
    first_label: int
    folders: Sequence[str]  # where they may lie, below the data set's folder or beside it
    sorted_labels: bool = True  # whether the labels count the classes in the catalog's order
    only: bool = False
    needed: bool = True  # whether, with `only`, the data set cannot do without them


@dataclass(frozen=True)
class SplitRule:
    """Official lists where there are some and they are found, else a seeded share for validation."""

    val_fraction: float = 0.2
    lists: Lists | None = None
    target: Literal["all", "test"] = "all"  # what a target is adapted to


def find_lists(lists: Lists, places: Sequence[Path], names: Names) -> Path | None:
    """Return the folder that holds every list; one that holds some of them is an error."""
    wanted = [lists.file.format(domain=d, part=p) for d in names.domains for p in lists.parts]
    for place in places:
        for folder in (place / name for name in ("", *lists.folders)):
            missing = [name for name in wanted if not (folder / name).is_file()]
            if not missing:
                return folder
            if len(missing) < len(wanted) and folder != place:
                raise DataError(
                    f"'{printable(folder)}' lacks {', '.join(missing[:3])}"
                    f"{', ...' if len(missing) > 3 else ''}: put all {len(wanted)} official lists there"
                )
    return None


def apply_lists(
    lists: Lists, folder: Path, items: Sequence[Item], names: Names
) -> tuple[tuple[Item, ...], list[str]]:
    """Return the items with the parts that the lists give them, and lines about what does not agree.

    The validation part wins over the training part; a test list that names images of both changes nothing.
    """
    part_of: dict[tuple[str, int, str], str] = {}
    notes: list[str] = []
    have = {_key(item): item for item in items}
    for domain in names.domains:
        for written, part in sorted(lists.parts.items(), key=lambda pair: pair[1] != "test"):
            path = folder / lists.file.format(domain=domain, part=written)
            keys = _read_list(path, lists, names)
            missing = [key for key in keys if key not in have]
            if missing:
                notes.append(
                    f"{path.name}: {len(missing)} of {len(keys)} images are missing, as {missing[0][2]}"
                )
            part_of |= dict.fromkeys(keys, part)
    unlisted = sum(key not in part_of for key in have)
    if unlisted and not lists.only:
        notes.append(f"{unlisted} images are in no list")
    kept = [replace(item, part=part_of.get(key, "")) for key, item in have.items()]
    return tuple(item for item in kept if _key(item) in part_of or not lists.only), notes


def _key(item: Item) -> tuple[str, int, str]:
    return item.domain, item.label, PurePosixPath(item.file.name).name


def _read_list(path: Path, lists: Lists, names: Names) -> list[tuple[str, int, str]]:
    """Return the images a list names, each checked against its label."""
    domain_of, label_of = names.domain_of(), names.label_of()
    keys = []
    # As file systems give names: a list in another encoding still names its files.
    text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            name, label = line.rsplit(maxsplit=1)
            domain, folder, file = PurePosixPath(name).parts[-3:]
            key = (domain_of[plain(domain)], label_of[plain(folder)], file)
            if lists.sorted_labels and int(label) - lists.first_label != key[1]:
                raise ValueError(f"label {label} for class {folder}")
        except (ValueError, KeyError) as error:
            raise DataError(
                f"'{printable(path)}', line {number}: '{printable(line.strip())}' is not understood "
                f"({printable(str(error))})"
            ) from error
        keys.append(key)
    return keys


def at_most(count: int | None, items: Sequence[Item]) -> Sequence[Item]:
    """Return so many items of one domain, one of every class in turn; None: all of them.

    The draw has a fixed seed, so that runs of different seeds share decoded images.
    """
    if count is None or count >= len(items):
        return items
    labels = {item.label for item in items}
    if count < len(labels):
        domain = items[0].domain
        raise ConfigError(f"images={count} is fewer than the {len(labels)} classes of domain '{domain}'")
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(0)).tolist()
    seen: Counter[int] = Counter()
    turns = []
    for position in order:
        turns.append((seen[items[position].label], position))
        seen[items[position].label] += 1
    return [items[position] for _, position in sorted(turns)[:count]]


def seeded(items: Sequence[Item], val_fraction: float, seed: int) -> tuple[Item, ...]:
    """Return the items of one domain, those without a part divided class by class into train and val."""
    open_items = [position for position, item in enumerate(items) if not item.part]
    labels = torch.tensor([items[position].label for position in open_items], dtype=torch.int64)
    val = set(split_indices(labels, val_fraction, seed)[1].tolist())
    divided = list(items)
    for index, position in enumerate(open_items):
        divided[position] = replace(items[position], part="val" if index in val else "train")
    return tuple(divided)


def stored(root: Path, items: Sequence[Item], val_fraction: float, seed: int) -> tuple[Item, ...]:
    """Return the items divided as they were the first time; images that are new since are divided and added.

    The split of own data is made once and kept beside the data, so that images which come later never move
    an old one between training and validation. A folder that cannot be written gets the same seeded split.
    """
    path = root / STORED / f"split-seed{seed}-val{val_fraction:g}.csv"
    known = _read_stored(path)
    marked = [replace(item, part=known.get(item.file.name, item.part)) for item in items]
    by_domain: dict[str, list[Item]] = {}
    for item in marked:
        by_domain.setdefault(item.domain, []).append(item)
    divided = tuple(item for part in by_domain.values() for item in seeded(part, val_fraction, seed))
    now = {item.file.name: item.part for item in divided}
    if now.items() - known.items():
        _write_stored(path, {**known, **now})
    return divided


def _read_stored(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            rows = list(csv.reader(file))
    except csv.Error:
        rows = []
    if (
        not rows
        or rows[0] != ["path", "part"]
        or any(len(row) != 2 or row[1] not in ("train", "val") for row in rows[1:])
    ):
        raise DataError(f"'{printable(path)}' is damaged: remove it and the images are divided anew")
    return dict(rows[1:])


def _write_stored(path: Path, parts: Mapping[str, str]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(exist_ok=True)
        with part.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            csv.writer(file).writerows([("path", "part"), *sorted(parts.items())])
        part.replace(path)
    except OSError:
        # Own data may lie where nothing can be written. The split is a function of the seed and the images.
        return
