"""A data set by name, a folder of domains or a table of images -> decoded domains."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from vicinal.data.cache import default_cache
from vicinal.data.catalog import DATASETS
from vicinal.data.domains import DomainSet
from vicinal.data.entries import Arrays, DatasetEntry, Request, Tree, TreeOptions
from vicinal.data.files import printable
from vicinal.data.find import OFFICIAL, data_dirs, find_tree, how_to_get, needs_lists, places
from vicinal.data.folder import list_folder
from vicinal.data.images import Decoding, Fit, Progress
from vicinal.data.layouts import Item
from vicinal.data.listing import Listing, decode_listing, in_order
from vicinal.data.splits import at_most, seeded
from vicinal.data.table import list_table, require_files
from vicinal.errors import ConfigError, DataError

FOLDER_SIZE = 224
FOLDER_CHANNELS = 3


def load_dataset(
    name_or_path: str,
    size: int | None = None,
    channels: int | None = None,
    *,
    fit: Fit | None = None,
    val_fraction: float = 0.2,
    seed: int = 0,
    skip_bad: bool = False,
    progress: Progress | None = None,
    data_dir: Path | None = None,
    cache: Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> DomainSet:
    """Return the data set of that name, else the domains of that folder or CSV.

    A name wins over a folder that is called the same: write "./digits" for the folder. `val_fraction` is for
    own data: a named data set has its own split. `options` are a named data set's own.
    """
    cache = default_cache() if cache is None else cache
    if name_or_path in DATASETS:
        entry = DATASETS[name_or_path]
        chosen = with_options(entry, options or {})
        how = Decoding(_given(size, entry.size), _given(channels, entry.channels), fit or entry.fit)
        if not isinstance(entry.source, Tree):
            return _load_arrays(entry, how, seed, chosen, data_dirs(data_dir), cache, progress)
        listing = list_entry(entry, data_dirs(data_dir), seed, chosen)
    else:
        if options:
            raise ConfigError(f"own data have no options: {', '.join(options)}")
        how = Decoding(_given(size, FOLDER_SIZE), _given(channels, FOLDER_CHANNELS), fit or "crop")
        listing = list_own(name_or_path, val_fraction, seed)
        if listing.facts["layout"] == "table" and not skip_bad:
            require_files(listing, Path(name_or_path))
    return decode_listing(listing, how, cache, skip_bad=skip_bad, progress=progress)


def list_own(path: str, val_fraction: float = 0.2, seed: int = 0) -> Listing:
    """Return the images of a folder of domains or of a CSV."""
    root = Path(path)
    if not path or not root.exists():
        names = ", ".join(sorted(DATASETS))
        raise DataError(
            f"unknown dataset '{path}': choose from {names}, or the path of a folder of domain folders "
            "or of a CSV with path, label and domain"
        )
    if root.is_file():
        return list_table(root, val_fraction=val_fraction, seed=seed)
    return list_folder(root, val_fraction=val_fraction, seed=seed)


def list_entry(
    entry: DatasetEntry, dirs: Sequence[Path], seed: int = 0, options: TreeOptions | None = None
) -> Listing:
    """Return the images of a named data set, divided by its rule; one clear line if they are not there."""
    assert isinstance(entry.source, Tree)
    found, rule = find_tree(entry, dirs), entry.source.split
    if found is None:
        where = ", ".join(f"'{printable(directory)}'" for directory in dirs)
        raise DataError(f"{entry.name} was not found in {where}: {how_to_get(entry, dirs[0])}")
    if needs_lists(entry) and found.split != OFFICIAL:
        raise DataError(f"{entry.name} needs its lists: {how_to_get(entry, dirs[0])}")
    by_domain: dict[str, list[Item]] = {domain: [] for domain in entry.domains}
    for item in found.items:
        by_domain[item.domain].append(item)
    missing = [domain for domain, items in by_domain.items() if not items]
    if missing:
        raise DataError(
            f"'{printable(found.root)}' has no images of {', '.join(missing)}: {how_to_get(entry, dirs[0])}"
        )
    most = None if options is None else options.images
    # In order, because an archive may hold the same images in any: the split must not depend on it.
    divided = tuple(
        item
        for items in by_domain.values()
        for item in seeded(at_most(most, in_order(items)), rule.val_fraction, seed)
    )
    target = rule.target if found.split == OFFICIAL else "all"
    facts = {"layout": found.layout, "split": found.split, **({} if most is None else {"images": most})}
    return Listing(entry.name, entry.classes, entry.domains, divided, target, facts)


def _load_arrays(
    entry: DatasetEntry,
    how: Decoding,
    seed: int,
    options: Any,
    dirs: Sequence[Path],
    cache: Path,
    progress: Progress | None,
) -> DomainSet:
    source = entry.source
    assert not isinstance(source, Tree)
    if isinstance(source, Arrays) and source.find(places(entry, dirs)) is None:
        where = ", ".join(f"'{printable(directory)}'" for directory in dirs)
        raise DataError(f"{entry.name} was not found in {where}: {how_to_get(entry, dirs[0])}")
    request = Request(how.size, how.channels, seed, options, places(entry, dirs), cache, progress)
    data = source.load(request)
    facts = {"options": dataclasses.asdict(options)} if options is not None else {}
    return dataclasses.replace(data, facts={**data.facts, **facts, "size": how.size})


def with_options(entry: DatasetEntry, given: Mapping[str, Any]) -> Any:
    """Return the entry's options with some of them given; text is read as what the default is."""
    if not given:
        return entry.options
    known = {} if entry.options is None else dataclasses.asdict(entry.options)
    unknown = [name for name in given if name not in known]
    if unknown:
        valid = ", ".join(known) or "none"
        raise ConfigError(f"unknown option {', '.join(unknown)} of {entry.name}: it has {valid}")
    may_be_none = {
        n for n, hint in get_type_hints(type(entry.options)).items() if type(None) in get_args(hint)
    }
    parsed = {n: _parsed(n, v, known[n], n in may_be_none) for n, v in given.items()}
    return dataclasses.replace(entry.options, **parsed)


def _parsed(name: str, value: Any, default: Any, may_be_none: bool) -> Any:
    """Return a value given as text in the type of the default: numbers, yes or no, comma-separated lists."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    try:
        if isinstance(default, tuple):
            kind = type(default[0]) if default else str
            return tuple(kind(part.strip()) for part in value.split(",") if part.strip())
        if isinstance(default, bool):
            return {"yes": True, "true": True, "no": False, "false": False}[value.lower()]
        if default is None or isinstance(default, int):
            return None if may_be_none and value.lower() in ("all", "none") else int(value)
        return type(default)(value)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"'{value}' cannot be read as {name}, which is like {default}") from error


def _given(value: int | None, default: int) -> int:
    """Return the value, or the default where there is none; a 0 is a value, to be refused later."""
    return default if value is None else value
