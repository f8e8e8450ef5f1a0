"""The data sets vicinal knows by name: one entry each, read by the command line and the docs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from vicinal.data.digits import ANGLES, load_digits_domains
from vicinal.data.domains import DomainSet
from vicinal.data.folder import load_folder
from vicinal.data.images import Progress, require_shape
from vicinal.errors import DataError
from vicinal.registry import Registry

FOLDER_SIZE = 224
FOLDER_CHANNELS = 3

Loader = Callable[[int, int, int], DomainSet]


@dataclass(frozen=True)
class DatasetEntry:
    """What is known of a data set before it is loaded; `loader` takes size, channels and seed."""

    name: str
    title: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    default_targets: tuple[str, ...]
    channels: int
    size: int
    licence: str
    loader: Loader


DATASETS: Registry[DatasetEntry] = Registry("dataset")


def load_dataset(
    name_or_folder: str,
    size: int | None = None,
    channels: int | None = None,
    *,
    val_fraction: float = 0.2,
    seed: int = 0,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> DomainSet:
    """Return the data set of that name, else the domains in that folder.

    A name wins over a folder that is called the same: write "./digits" for the folder. `val_fraction`,
    `skip_bad` and `progress` are for folders: a named data set has its own split.
    """
    if name_or_folder in DATASETS:
        entry = DATASETS[name_or_folder]
        return entry.loader(_given(size, entry.size), _given(channels, entry.channels), seed)
    root = Path(name_or_folder)
    if not name_or_folder or not root.exists():
        names = ", ".join(sorted(DATASETS))
        raise DataError(
            f"unknown dataset '{name_or_folder}': choose from {names}, "
            "or the path of a folder of domain folders"
        )
    return load_folder(
        root,
        _given(size, FOLDER_SIZE),
        _given(channels, FOLDER_CHANNELS),
        val_fraction=val_fraction,
        seed=seed,
        skip_bad=skip_bad,
        progress=progress,
    )


def _given(value: int | None, default: int) -> int:
    """Return the value, or the default where there is none; a 0 is a value, to be refused later."""
    return default if value is None else value


def _load_digits(size: int, channels: int, seed: int) -> DomainSet:
    """Return the rotated digits, their one channel repeated when three are asked for."""
    require_shape(size, channels)
    data = load_digits_domains(size, seed)
    domains = {
        name: replace(domain, images=domain.images.expand(-1, channels, -1, -1))
        for name, domain in data.domains.items()
    }
    return replace(data, domains=domains)


DATASETS.register("digits")(
    DatasetEntry(
        name="digits",
        title="Rotated digits: scikit-learn's 1,797 handwritten digits at seven angles",
        classes=tuple(str(digit) for digit in range(10)),
        domains=tuple(str(angle) for angle in ANGLES),
        default_targets=("0", "90"),
        channels=1,
        size=16,
        licence=(
            "scikit-learn (BSD-3-Clause) bundles the test set of UCI's Optical Recognition of Handwritten "
            "Digits, which UCI states is CC BY 4.0"
        ),
        loader=_load_digits,
    )
)
