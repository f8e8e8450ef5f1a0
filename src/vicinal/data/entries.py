"""What a catalog entry says of a data set, and the kinds of places its images come from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vicinal.data.domains import MIN_SOURCES, DomainSet
from vicinal.data.download import Download
from vicinal.data.images import Fit, Progress
from vicinal.data.layouts import Annotations, Layout, Names
from vicinal.data.splits import SplitRule
from vicinal.errors import ConfigError, DataError


@dataclass(frozen=True)
class Request:
    """What a loader of arrays is asked for."""

    size: int
    channels: int
    seed: int
    options: Any  # the entry's own options, a frozen dataclass, or None
    places: Sequence[Path]  # folders to look in, the most likely first
    cache: Path
    progress: Progress | None = None


@dataclass(frozen=True)
class Tree:
    """Images in folders or archives. `folders` are the names its own folder goes by in the data folder."""

    folders: tuple[str, ...]
    layouts: tuple[Layout, ...]
    split: SplitRule = field(default_factory=SplitRule)
    archives: tuple[str, ...] = ()  # patterns of archives that may lie in the data folder itself
    annotations: Annotations | None = None
    domain_folders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    class_folders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class TreeOptions:
    """How much is taken of a data set in folders: at most `images` of each domain; None: all there are."""

    images: int | None = None

    def __post_init__(self) -> None:
        if self.images is not None and self.images < 1:
            raise ConfigError(f"images must be at least 1 of each domain, or None, not {self.images}")


@dataclass(frozen=True)
class Arrays:
    """Images in a few files of arrays: how to find them, to load them, and what they are called."""

    folders: tuple[str, ...]
    files: tuple[str, ...]  # what to put there, for people
    find: Callable[[Sequence[Path]], Path | None]
    load: Callable[[Request], DomainSet]
    elsewhere: tuple[str, ...] = ()  # absolute folders that system packages install to
    lacks: Callable[[Sequence[Path]], str | None] = lambda _: None  # what is missing beside what was found


@dataclass(frozen=True)
class BuiltIn:
    """Images that come with a dependency."""

    load: Callable[[Request], DomainSet]


@dataclass(frozen=True)
class DatasetEntry:
    """What is known of a data set before it is loaded."""

    name: str
    title: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    default_targets: tuple[str, ...]
    channels: int
    size: int
    licence: str
    source: Tree | Arrays | BuiltIn
    counts: Mapping[str, int]
    class_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    other_counts: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict
    )  # of other versions that are about
    home: str = ""
    downloads: tuple[Download, ...] = ()
    fit: Fit = "squash"  # DomainBed and Dassl squash; only pictures that are not square are concerned
    options: Any = None  # defaults of what can be configured, a frozen dataclass
    min_sources: int = MIN_SOURCES
    note: str = ""

    def __post_init__(self) -> None:
        # A slip in the tables would show only when the data are there: better at import.
        for domain, counts in self.class_counts.items():
            if len(counts) != len(self.classes) or sum(counts) != self.counts[domain]:
                raise DataError(f"catalog entry '{self.name}': the counts of '{domain}' do not agree")
        if set(self.default_targets) - set(self.domains) or set(self.counts) != set(self.domains):
            raise DataError(f"catalog entry '{self.name}': targets or counts name unknown domains")

    @property
    def names(self) -> Names:
        """Domains and classes, and what folders call them."""
        tree = self.source
        if isinstance(tree, Tree):
            return Names(self.domains, self.classes, tree.domain_folders, tree.class_folders)
        return Names(self.domains, self.classes)

    @property
    def images(self) -> int:
        """How many images all domains have together."""
        return sum(self.counts.values())
