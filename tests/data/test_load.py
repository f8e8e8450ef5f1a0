"""Arrays by name, their options given as text, and the real data where they are."""

import gzip
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vicinal.data.catalog import DATASETS
from vicinal.data.cifar import CORRUPTIONS
from vicinal.data.domains import assign_roles
from vicinal.data.load import list_entry, load_dataset, with_options
from vicinal.errors import ConfigError, DataError, VicinalError

Trees = Any  # of conftest.py
MakeTree = Callable[..., Path]

TRAIN, TEST = 40, 20
REAL = Path(os.environ.get("VICINAL_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
FASHION = Path("/usr/share/datasets/fashion-mnist")


def refused(name: str, data: Path, **options: Any) -> str:
    """Return the one line by which a data set is refused."""
    with pytest.raises(VicinalError) as caught:
        load_dataset(name, data_dir=data, options=options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- Rotated sets -----------------------------------------------------------------------------------------


def write_idx(folder: Path, packed: bool = False) -> Path:
    """Write four tiny files: image i of the train part is all 1 + i, of the test part all 101 + i."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count, first in (("train", TRAIN, 1), ("t10k", TEST, 101)):
        pixels = np.repeat(np.arange(first, first + count, dtype=np.uint8), 28 * 28).tobytes()
        labels = bytes(k % 10 for k in range(count))
        for kind, shape, body in (("images", (count, 28, 28), pixels), ("labels", (count,), labels)):
            head = bytes([0, 0, 8, len(shape)]) + b"".join(struct.pack(">I", n) for n in shape)
            name = f"{part}-{kind}-idx{len(shape)}-ubyte"
            content = head + body
            (folder / (f"{name}.gz" if packed else name)).write_bytes(
                gzip.compress(content) if packed else content
            )
    return folder


ROTATED = [
    ("rotated_mnist", "MNIST/raw"),
    ("rotated_fashion", "FashionMNIST/raw"),
    ("rotated_fashion", "fashion-mnist"),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "folder"), ROTATED)
def test_rotated_sets_with_options_given_as_text(
    tmp_path: Path, name: str, folder: str, packed: bool
) -> None:
    write_idx(tmp_path / folder, packed)
    given = {"angles": "0,45, 90", "train": "20", "val": "5", "test": "10"}
    data = load_dataset(name, data_dir=tmp_path, options=given)
    assert data.name == name
    assert data.classes == DATASETS[name].classes
    assert list(data.domains) == ["0", "45", "90"]
    upright = data.domains["0"]
    assert upright.images.shape == (35, 1, 28, 28)
    assert [len(upright.train), len(upright.val), len(upright.test)] == [20, 5, 10]
    centre = upright.images[:, 0, 14, 14].tolist()
    for level, path, label in zip(centre, upright.paths, upright.labels.tolist(), strict=True):
        part, number = path.split("/")
        assert level == int(number) + (1 if part == "train" else 101)
        assert label == int(number) % 10
    for domain in data.domains.values():
        assert domain.paths == upright.paths
        assert torch.equal(domain.images[:, :, 14, 14], upright.images[:, :, 14, 14])
        assert set(domain.train.tolist()).isdisjoint(domain.val.tolist())
    assert data.facts["options"] == {
        "angles": (0, 45, 90),
        "train": 20,
        "val": 5,
        "test": 10,
        "base_seed": 0,
    }
    assert data.facts["size"] == 28
    roles = assign_roles(data, ["0"])
    assert len(roles.targets[0].images) == 10


def test_all_takes_what_is_left(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist")
    one = load_dataset("rotated_mnist", data_dir=tmp_path, options={"train": "all", "val": "5"}).domains["15"]
    assert [len(one.train), len(one.val), len(one.test)] == [35, 5, 20]
    one = load_dataset("rotated_mnist", data_dir=tmp_path, options={"train": "30", "val": "None"}).domains[
        "15"
    ]
    assert [len(one.train), len(one.val), len(one.test)] == [30, 10, 20]


def test_size_and_channels_are_given(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist")
    given = {"train": 5, "val": 1, "angles": [0, 15]}
    data = load_dataset("rotated_mnist", 20, 3, data_dir=tmp_path, options=given)
    assert data.domains["15"].images.shape == (26, 3, 20, 20)
    assert data.facts["size"] == 20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"angle": "0"},
            "unknown option angle of rotated_mnist: it has angles, train, val, test, base_seed",
        ),
        ({"angles": "0,north"}, "'0,north' cannot be read as angles, which is like (0, 15, 30"),
        ({"angles": ""}, "angles must be given, each once"),
        ({"angles": "0,0"}, "angles must be given, each once"),
        ({"angles": "400"}, "angles must be whole degrees from 0 to 359, not 400"),
        ({"train": "many"}, "'many' cannot be read as train, which is like 2000"),
        ({"train": "2.5"}, "'2.5' cannot be read as train"),
        ({"train": "0"}, "train must be at least 1"),
        ({"train": "all", "val": "all"}, "train and val cannot both be all that is left"),
        ({"base_seed": "none"}, "'none' cannot be read as base_seed"),
        ({}, "train=2000 and val=400 ask for more than the base's 40 training images: ask for fewer"),
        ({"train": "5", "val": "1", "test": "21"}, "test asks for 21 images a domain, the base has 20"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, options: dict[str, str], said: str) -> None:
    write_idx(tmp_path / "mnist")
    assert said in refused("rotated_mnist", tmp_path, **options)


def test_rotated_files_missing_or_damaged_are_one_line(tmp_path: Path) -> None:
    line = refused("rotated_mnist", tmp_path)
    assert line.startswith(
        f"rotated_mnist was not found in '{tmp_path}': vicinal data get rotated_mnist, or put "
    )
    assert f"the three other idx files into '{tmp_path / 'MNIST'}'" in line
    folder = write_idx(tmp_path / "MNIST")
    (folder / "t10k-labels-idx1-ubyte").rename(tmp_path / "aside")
    assert "rotated_mnist was not found" in refused("rotated_mnist", tmp_path)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"<html>")
    assert "not an IDX file" in refused("rotated_mnist", tmp_path)


def test_fashion_is_not_taken_for_mnist(tmp_path: Path) -> None:
    write_idx(tmp_path / "FashionMNIST" / "raw")
    assert "rotated_mnist was not found" in refused("rotated_mnist", tmp_path)


# --- CIFAR-10-C -------------------------------------------------------------------------------------------


def write_cifar(root: Path, corruptions: tuple[str, ...] = CORRUPTIONS) -> None:
    """Write batches of ten images and the published arrays; a corrupted image is all its severity."""
    batches = root / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    labels = list(range(10))
    for k, name in enumerate((*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")):
        content = {b"data": np.full((10, 3072), k, np.uint8), b"labels": labels}
        (batches / name).write_bytes(pickle.dumps(content, protocol=2))
    arrays = root / "CIFAR-10-C"
    arrays.mkdir()
    np.save(arrays / "labels.npy", np.tile(np.array(labels, np.uint8), 5))
    for name in corruptions:
        levels = np.repeat(np.arange(1, 6, dtype=np.uint8), 10)[:, None, None, None]
        np.save(arrays / f"{name}.npy", np.broadcast_to(levels, (50, 32, 32, 3)))


def test_cifar_as_the_catalog_says(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    entry, data = DATASETS["cifar10_c"], load_dataset("cifar10_c", data_dir=tmp_path)
    assert (data.name, data.classes, tuple(data.domains)) == (entry.name, entry.classes, entry.domains)
    original = data.domains["original"]
    assert [len(original.train), len(original.val), len(original.test)] == [40, 10, 10]
    for name in CORRUPTIONS:
        domain = data.domains[f"{name}-5"]
        assert set(domain.images.unique().tolist()) == {5}
        assert [len(domain.train), len(domain.val), len(domain.test)] == [0, 0, 10]
    roles = assign_roles(data, entry.default_targets, entry.min_sources)
    assert [source.name for source in roles.sources] == ["original"]
    assert data.facts["corruptions_from"] == "published arrays"


def test_cifar_with_options_given_as_text(tmp_path: Path) -> None:
    write_cifar(tmp_path, ("fog", "frost"))
    given = {"severities": "1,3", "corruptions": "frost, fog", "regenerate": "no"}
    data = load_dataset("cifar10_c", data_dir=tmp_path, options=given)
    assert list(data.domains) == ["original", "frost-1", "frost-3", "fog-1", "fog-3"]
    assert set(data.domains["fog-3"].images.unique().tolist()) == {3}
    assert data.facts["options"]["severities"] == (1, 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"severities": "6"}, "severities go from 1 to 5, not 6"),
        ({"severities": "worst"}, "'worst' cannot be read as severities, which is like (5,)"),
        ({"severities": "5,5"}, "severities must be given, each once"),
        ({"corruptions": "mist"}, "unknown corruption 'mist': choose from brightness"),
        ({"regenerate": "perhaps"}, "'perhaps' cannot be read as regenerate, which is like False"),
        ({"corruption_seed": "-1"}, "the corruption seed must be at least 0"),
        ({"corruption_seed": "all"}, "'all' cannot be read as corruption_seed"),
        ({}, "CIFAR-10-C' lacks shot_noise.npy: put it there"),
    ],
)
def test_bad_cifar_options_are_one_line(tmp_path: Path, options: dict[str, str], said: str) -> None:
    write_cifar(tmp_path, ("gaussian_noise",))
    assert said in refused("cifar10_c", tmp_path, **options)


def test_cifar_files_missing_are_one_line(tmp_path: Path) -> None:
    assert "cifar10_c was not found in" in refused("cifar10_c", tmp_path)
    write_cifar(tmp_path, ())
    (tmp_path / "CIFAR-10-C" / "labels.npy").unlink()
    assert "the arrays of CIFAR-10-C are missing: put the folder CIFAR-10-C" in refused("cifar10_c", tmp_path)


# --- Options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "has"), [("pacs", "images"), ("digits", "none")])
def test_sets_without_an_option_say_so(name: str, has: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option angles of {name}: it has {has}"):
        with_options(DATASETS[name], {"angles": "0"})
    assert with_options(DATASETS[name], {}) == DATASETS[name].options


def test_a_data_set_in_folders_is_cut_to_so_many_images_of_each_domain(trees: Trees, tmp_path: Path) -> None:
    entry = DATASETS["pacs"]
    trees.write(tmp_path / "data" / "PACS", trees.files(entry, count=3))
    whole = trees.load("pacs", tmp_path / "data")
    data = trees.load("pacs", tmp_path / "data", options={"images": "17"}, seed=0)
    other = trees.load("pacs", tmp_path / "data", options={"images": "17"}, seed=1)
    for name, domain in data.domains.items():
        counts = torch.bincount(domain.labels)
        assert (len(domain.labels), len(counts), int(counts.min())) == (17, 7, 2)
        assert set(domain.paths) < set(whole.domains[name].paths)
        assert sorted([*domain.train.tolist(), *domain.val.tolist()]) == list(range(17))
        assert set(domain.labels[domain.train].tolist()) == set(range(7))
        assert domain.test.tolist() == list(range(17))
        assert other.domains[name].paths == domain.paths
    assert data.facts["images"] == 17
    assert "images" not in whole.facts


def test_images_of_each_domain_must_do_for_every_class(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path / "PACS", trees.files(DATASETS["pacs"]))
    said = refused("pacs", tmp_path, images="6")
    assert said == "images=6 is fewer than the 7 classes of domain 'art_painting'"
    assert "at least 1" in refused("pacs", tmp_path, images="0")
    assert len(trees.load("pacs", tmp_path, options={"images": "99"}).domains["photo"].labels) == 14


@pytest.mark.parametrize("text", ["yes", "TRUE", "no", "False"])
def test_yes_and_no(text: str) -> None:
    found = with_options(DATASETS["cifar10_c"], {"regenerate": text})
    assert found.regenerate is (text in ("yes", "TRUE"))


def test_values_that_are_not_text_pass_through() -> None:
    found = with_options(DATASETS["rotated_mnist"], {"angles": [0, 15], "train": None, "val": 7})
    assert (found.angles, found.train, found.val) == ((0, 15), None, 7)
    assert with_options(DATASETS["rotated_mnist"], {}) == DATASETS["rotated_mnist"].options


# --- Where and how ----------------------------------------------------------------------------------------


def test_the_variable_names_the_data_folders(
    trees: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = DATASETS["pacs"]
    trees.write(tmp_path / "two" / "PACS", trees.files(entry))
    monkeypatch.setenv("VICINAL_DATA", os.pathsep.join(str(tmp_path / name) for name in ("one", "two")))
    trees.check(load_dataset("pacs", 1), entry)
    (tmp_path / "three").mkdir()
    with pytest.raises(DataError, match=r"pacs was not found in '.*three': "):
        load_dataset("pacs", 1, data_dir=tmp_path / "three")


def test_size_channels_and_fit_have_the_entrys_defaults(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path / "PACS", trees.files(DATASETS["pacs"]))
    data = load_dataset("pacs", data_dir=tmp_path)
    assert data.domains["photo"].images.shape == (14, 3, 224, 224)
    assert (data.facts["size"], data.facts["fit"]) == (224, "squash")
    data = load_dataset("pacs", 4, 1, fit="crop", data_dir=tmp_path)
    assert data.domains["photo"].images.shape == (14, 1, 4, 4)
    assert data.facts["fit"] == "crop"


def test_a_second_load_decodes_nothing_and_is_the_same(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path / "data" / "PACS", trees.files(DATASETS["pacs"]))
    seen: list[int] = []
    one, two = (
        trees.load("pacs", tmp_path / "data", progress=lambda done, total: seen.append(total))
        for _ in range(2)
    )
    assert seen == [56] * 56
    trees.same(one, two)


def test_default_places_are_the_variables(
    make_tree: MakeTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VICINAL_CACHE", str(tmp_path / "kept"))
    load_dataset(str(make_tree()), 2, 1)
    assert any((tmp_path / "kept").rglob("images.u8"))


# --- The real thing ---------------------------------------------------------------------------------------

PACS_COUNTS = {
    "art_painting": ([379, 255, 285, 184, 201, 295, 449], (1840, 208, 2048)),
    "cartoon": ([389, 457, 346, 135, 324, 288, 405], (2107, 237, 2344)),
    "photo": ([189, 202, 182, 186, 199, 280, 432], (1499, 171, 1670)),
    "sketch": ([772, 740, 753, 608, 816, 80, 160], (3531, 398, 3929)),
}


@pytest.mark.skipif(
    not (REAL / "pacs-sketch.tar").is_file(), reason="the four tars of PACS are not there (VICINAL_TEST_DATA)"
)
def test_the_real_pacs_is_listed_as_published() -> None:
    listing = list_entry(DATASETS["pacs"], [REAL])
    assert listing.facts == {"layout": "DomainBed", "split": "official lists"}
    assert len(listing.items) == 9991
    for domain, (per_class, (train, val, test)) in PACS_COUNTS.items():
        items = listing.of(domain)
        assert [sum(item.label == label for item in items) for label in range(7)] == per_class
        parts = [item.part for item in items]
        assert (parts.count("train"), parts.count("val"), len(parts)) == (train, val, test)
        assert items[0].file.read()[:3] in (b"\xff\xd8\xff", b"\x89PN")
        assert items[-1].file.read()[:3] in (b"\xff\xd8\xff", b"\x89PN")


@pytest.mark.skipif(
    not (FASHION / "train-images-idx3-ubyte.gz").is_file(), reason="dataset-fashion-mnist is not installed"
)
def test_the_real_fashion_mnist_is_found_where_debian_puts_it(tmp_path: Path) -> None:
    given = {"angles": "0,90", "train": "100", "val": "50", "test": "200"}
    data = load_dataset("rotated_fashion", data_dir=tmp_path, options=given)
    upright, turned = data.domains["0"], data.domains["90"]
    assert upright.images.shape == (350, 1, 28, 28)
    assert torch.equal(turned.images, upright.images.rot90(1, (2, 3)))
    assert set(upright.labels.tolist()) == set(range(10))
