"""The ways people keep one data set on disk, each a template, and the images found by them."""

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from vicinal.data.files import ImageFile, printable
from vicinal.errors import DataError

MAX_STRANGERS = 3


@dataclass(frozen=True, slots=True)
class Item:
    """One labelled image; `part` is "train", "val" or "test" where an official split says so."""

    domain: str
    label: int
    file: ImageFile
    part: str = ""


@dataclass(frozen=True)
class Names:
    """The domains and classes of a data set, and what folders call them where that differs."""

    domains: Sequence[str]
    classes: Sequence[str]
    domain_folders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    class_folders: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def domain_of(self) -> dict[str, str]:
        """Return the domain of each folder name, both in plain spelling."""
        return _spellings(self.domains, self.domain_folders)

    def label_of(self) -> dict[str, int]:
        """Return the label of each folder name in plain spelling."""
        named = _spellings(self.classes, self.class_folders)
        return {folder: self.classes.index(name) for folder, name in named.items()}


def _spellings(names: Sequence[str], folders: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {plain(folder): name for name in names for folder in (name, *folders.get(name, ()))}


def plain(name: str) -> str:
    """Return a name in the spelling names are compared in: "Real World" and "real_world" are one."""
    return re.sub(r"[\s\-]+", "_", unicodedata.normalize("NFC", name).casefold())


@dataclass(frozen=True)
class Layout:
    """One way to keep a data set: the end of an image's path, as "{domain}/{label}/{file}".

    What comes before is found out, so that `kfold/`, `images/` and a folder too many all match. "train|test"
    stands for either folder.
    """

    name: str
    template: str = "{domain}/{label}/{file}"


@dataclass(frozen=True)
class Matched:
    """The images that one layout finds, the folder they are under, and the images it has no place for."""

    layout: str
    prefix: str
    items: tuple[Item, ...]
    strangers: int = 0
    examples: tuple[str, ...] = ()


def match(layouts: Sequence[Layout], files: Sequence[ImageFile], names: Names) -> Matched | None:
    """Return the match of the layout that places most images; the first such where several do."""
    found = [match_layout(layout, files, names) for layout in layouts]
    best = max(found, key=lambda matched: len(matched.items), default=None)
    return best if best is not None and best.items else None


def match_layout(layout: Layout, files: Sequence[ImageFile], names: Names) -> Matched:
    """Return the images whose path ends as the template says, under the folder that has most of them."""
    steps = [frozenset(step.split("|")) for step in layout.template.split("/")[:-1]]
    domain_of, label_of = names.domain_of(), names.label_of()
    by_prefix: dict[str, list[Item]] = defaultdict(list)
    placed: dict[str, str] = {}
    for file in files:
        parts = PurePosixPath(file.name).parts
        found = _place(parts[-len(steps) - 1 : -1], steps, domain_of, label_of)
        if found is not None and len(parts) > len(steps):
            prefix = "/".join(parts[: -len(steps) - 1])
            by_prefix[prefix].append(Item(*found, file))
            placed[file.name] = prefix
    if not by_prefix:
        return Matched(layout.name, "", ())
    prefix = max(by_prefix, key=lambda name: (len(by_prefix[name]), -len(name)))
    strangers = [file.name for file in files if placed.get(file.name) != prefix]
    return Matched(
        layout.name, prefix, tuple(by_prefix[prefix]), len(strangers), tuple(strangers[:MAX_STRANGERS])
    )


def _place(
    parts: Sequence[str],
    steps: Sequence[frozenset[str]],
    domain_of: Mapping[str, str],
    label_of: Mapping[str, int],
) -> tuple[str, int] | None:
    """Return domain and label of the folders above an image; None if they are not what the steps say."""
    domain, label = None, None
    for part, step in zip(parts, steps, strict=False):
        if "{domain}" in step:
            domain = domain_of.get(plain(part))
        elif "{label}" in step:
            label = label_of.get(plain(part))
        elif plain(part) not in step:
            return None
    return None if domain is None or label is None or len(parts) < len(steps) else (domain, label)


@dataclass(frozen=True)
class Annotations:
    """A json file as camera traps have it: images with a location, annotations with a category."""

    name: str
    sets: Sequence[
        Sequence[str]
    ]  # the names of the files that are read together; the first set there is counts
    location: Mapping[str, str]  # of an image -> domain

    def items(self, root: Path, files: Sequence[ImageFile], names: Names) -> tuple[Item, ...]:
        """Return the images that the json file in the root places; none without it."""
        on_disk = {path.name: path for path in sorted(root.rglob("*.json"))}
        chosen = next((names for names in self.sets if all(name in on_disk for name in names)), ())
        labelled = {PurePosixPath(file.name).name: file for file in files}
        # A picture that two annotation files name is one picture.
        items = {
            (item.file.name, item.label): item
            for name in chosen
            for item in self._read(on_disk[name], labelled, names)
        }
        return tuple(items.values())

    def _read(self, path: Path, on_disk: Mapping[str, ImageFile], names: Names) -> Iterator[Item]:
        labels = names.label_of()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            category = {entry["id"]: plain(entry["name"]) for entry in found["categories"]}
            images = {entry["id"]: entry for entry in found["images"]}
            pairs = {(entry["image_id"], entry["category_id"]): None for entry in found["annotations"]}
            for image_id, category_id in pairs:  # one image may show two animals: it then counts twice
                image = images[image_id]
                domain = self.location.get(str(image["location"]))
                label = labels.get(category[category_id])
                file = on_disk.get(PurePosixPath(image["file_name"]).name)
                if domain is not None and label is not None and file is not None:
                    yield Item(domain, label, file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"'{printable(path)}' is not the annotation file expected ({type(error).__name__}: {error}): "
                "get it anew"
            ) from error


def counts(items: Sequence[Item], names: Names) -> dict[str, list[int]]:
    """Return the images of each class of each domain."""
    found = Counter((item.domain, item.label) for item in items)
    return {domain: [found[domain, label] for label in range(len(names.classes))] for domain in names.domains}
