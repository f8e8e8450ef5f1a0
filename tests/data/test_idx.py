import gzip
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from vicinal.data.idx import FASHION_FOLDERS, MNIST_FOLDERS, find_idx, load_idx, read_idx
from vicinal.errors import DataError

DEBIAN = Path("/usr/share/datasets")
MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def idx_bytes(shape: Sequence[int], values: bytes, kind: int = 0x08) -> bytes:
    return bytes([0, 0, kind, len(shape)]) + b"".join(struct.pack(">I", n) for n in shape) + values


def write_set(folder: Path, mark: str = "-", suffix: str = "", train: int = 5, test: int = 3) -> Path:
    """The four files: image i of a part is filled with i (10 + i for test), its label is i % 10."""
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if suffix else bytes
    for part, count, base in (("train", train, 0), ("t10k", test, 10)):
        pixels = b"".join(bytes([base + i]) * 6 for i in range(count))
        images, labels = idx_bytes((count, 2, 3), pixels), idx_bytes((count,), bytes(range(count)))
        (folder / f"{part}-images{mark}idx3-ubyte{suffix}").write_bytes(pack(images))
        (folder / f"{part}-labels{mark}idx1-ubyte{suffix}").write_bytes(pack(labels))
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_values_and_shape(tmp_path: Path, packed: bool) -> None:
    content = idx_bytes((2, 3), bytes([1, 2, 3, 250, 251, 255]))
    path = tmp_path / "any-name"
    path.write_bytes(gzip.compress(content) if packed else content)
    array = read_idx(path)
    assert array.dtype == torch.uint8
    assert array.tolist() == [[1, 2, 3], [250, 251, 255]]
    array += 1  # an array of its own, not a view of the file's bytes


GOOD = idx_bytes((2, 2), b"abcd")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not an IDX file"),
        (b"<!doctype html>", "not an IDX file"),
        (bytes([0, 0, 8, 0]), "not an IDX file"),
        (idx_bytes((1,), b"abcd", kind=0x0D), "type 0x0d, not unsigned bytes"),
        (GOOD[:9], "cut off within its header"),
        (GOOD[:-1], r"cut off \(3 bytes of data where its header says 4\)"),
        (GOOD + b"e", r"longer than its header says \(5 bytes"),
        (idx_bytes((2**32 - 1,) * 3, b"abcd"), "cut off"),
        (gzip.compress(GOOD, mtime=0)[:-9], "cannot be read"),
        (gzip.compress(GOOD, mtime=0)[:-4] + b"zzzz", "cannot be read"),
        (b"\x1f\x8b" + b"garbage", "cannot be read"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError, match=why) as error:
        read_idx(path)
    assert "train-labels-idx1-ubyte" in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_idx(tmp_path / "none")


@pytest.mark.parametrize(("mark", "suffix"), [("-", ""), ("-", ".gz"), (".", ""), (".", ".gz")])
def test_the_four_files_under_each_of_their_names(tmp_path: Path, mark: str, suffix: str) -> None:
    folder = write_set(tmp_path / "set", mark, suffix)
    assert find_idx([folder]) == folder
    data = load_idx(folder)
    assert data.found == folder
    assert data.train_images.shape == (5, 1, 2, 3)
    assert data.test_images.shape == (3, 1, 2, 3)
    assert data.train_images[:, 0, 1, 2].tolist() == [0, 1, 2, 3, 4]
    assert data.test_images[:, 0, 0, 0].tolist() == [10, 11, 12]
    assert data.train_labels.tolist() == [0, 1, 2, 3, 4]
    assert data.test_labels.dtype == torch.int64


@pytest.mark.parametrize(
    "inner", ["", "raw", "MNIST/raw", "FashionMNIST/raw", "data", "package/data", "mnist"]
)
def test_found_in_the_usual_folders(tmp_path: Path, inner: str) -> None:
    folder = write_set(tmp_path / "second" / inner)
    (tmp_path / "first").mkdir()
    assert find_idx([tmp_path / "missing", tmp_path / "first", tmp_path / "second"]) == folder


def test_names_keep_the_two_data_sets_apart(tmp_path: Path) -> None:
    mnist, fashion = write_set(tmp_path / "MNIST" / "raw"), write_set(tmp_path / "FashionMNIST" / "raw")
    assert find_idx([tmp_path], MNIST_FOLDERS) == mnist
    assert find_idx([tmp_path], FASHION_FOLDERS) == fashion


def test_three_files_are_not_found_and_the_fourth_is_named(tmp_path: Path) -> None:
    folder = write_set(tmp_path)
    (folder / "t10k-labels-idx1-ubyte").unlink()
    assert find_idx([folder]) is None
    with pytest.raises(DataError, match="lacks t10k-labels-idx1-ubyte"):
        load_idx(folder)


def test_an_unpacked_file_wins(tmp_path: Path) -> None:
    folder = write_set(tmp_path)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"damaged")
    assert len(load_idx(folder).train_images) == 5


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("train-labels-idx1-ubyte", idx_bytes((4,), bytes(4)), "5 images and 4 labels"),
        ("train-labels-idx1-ubyte", idx_bytes((5,), bytes([0, 1, 2, 3, 10])), "go up to 10, past 9"),
        ("train-labels-idx1-ubyte", idx_bytes((5, 1), bytes(5)), "2 dimensions where labels have 1"),
        ("t10k-images-idx3-ubyte", idx_bytes((3, 6), bytes(18)), "2 dimensions where images have 3"),
        ("t10k-images-idx3-ubyte", idx_bytes((3, 3, 3), bytes(27)), r"differ in size \(3 x 2 and 3 x 3\)"),
        ("t10k-images-idx3-ubyte", idx_bytes((0, 2, 3), b""), "0 images and 3 labels"),
    ],
)
def test_files_that_do_not_fit_each_other(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    folder = write_set(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=why):
        load_idx(folder)


def real(names: tuple[str, ...]) -> Path:
    places = [Path(os.environ["VICINAL_DATA"])] if os.environ.get("VICINAL_DATA") else []
    found = find_idx([place / name for place in (*places, DEBIAN) for name in names])
    if found is None:
        pytest.skip("not here: it is looked for below VICINAL_DATA and where Debian puts it")
    return found


def test_real_mnist() -> None:
    data = load_idx(real(MNIST_FOLDERS))
    assert data.train_labels.bincount().tolist() == MNIST_COUNTS
    assert len(data.test_labels) == 10_000
    assert data.train_images.float().mean() / 255 == pytest.approx(0.1307, abs=1e-4)


def test_real_fashion_mnist() -> None:
    data = load_idx(real(FASHION_FOLDERS))
    assert data.train_labels.bincount().tolist() == [6000] * 10
    assert data.test_labels.bincount().tolist() == [1000] * 10
    assert data.train_images.float().mean() / 255 == pytest.approx(0.2860, abs=1e-4)
