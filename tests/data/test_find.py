import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vicinal.data.catalog import DATASETS
from vicinal.data.entries import Arrays, BuiltIn, DatasetEntry, Tree
from vicinal.data.find import data_dirs, find_tree, how_to_get, needs_lists, places, status

Trees = Any  # of conftest.py

PACS = DATASETS["pacs"]


def small(entry: DatasetEntry, count: int) -> DatasetEntry:
    """Return the entry as if it had that many images of every class."""
    each = count * len(entry.classes)
    return replace(entry, counts=dict.fromkeys(entry.domains, each), class_counts={}, other_counts={})


# --- Data folders -----------------------------------------------------------------------------------------


def test_the_folder_given_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VICINAL_DATA", "/one")
    assert data_dirs(Path("here")) == [Path("here")]


def test_the_variable_may_name_several_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VICINAL_DATA", os.pathsep.join(["/one", "", "two"]))
    assert data_dirs() == [Path("/one"), Path("two")]


@pytest.mark.parametrize("value", [None, "", os.pathsep])
def test_the_default_is_in_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VICINAL_DATA")
    if value is not None:
        monkeypatch.setenv("VICINAL_DATA", value)
    assert data_dirs() == [tmp_path / "vicinal-data"]


def test_the_fuller_of_several_folders_counts(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path / "one" / "PACS", trees.files(PACS, count=1))
    trees.write(tmp_path / "two" / "pacs_data", trees.files(PACS, count=3))
    trees.write(tmp_path / "two" / "PACS", trees.files(PACS, count=2))
    found = find_tree(PACS, [tmp_path / "gone", tmp_path / "one", tmp_path / "two"])
    assert found is not None
    assert found.root == tmp_path / "two" / "pacs_data"
    assert find_tree(PACS, [tmp_path / "gone"]) is None
    assert find_tree(PACS, []) is None


def test_two_sets_in_one_data_folder_are_kept_apart(trees: Trees, tmp_path: Path) -> None:
    full, mini = DATASETS["domainnet"], DATASETS["mini_domainnet"]
    trees.write(tmp_path / "PACS", trees.files(PACS))
    trees.write(tmp_path / "domain_net", trees.files(full, count=1))
    pacs, net, part = (find_tree(entry, [tmp_path]) for entry in (PACS, full, mini))
    assert pacs is not None
    assert net is not None
    assert part is not None
    assert (len(pacs.items), len(net.items), len(part.items)) == (56, 345 * 6, 126 * 4)
    assert find_tree(DATASETS["vlcs"], [tmp_path]) is None


def test_places_are_the_sets_own_folders_then_the_data_folders(tmp_path: Path) -> None:
    for name in ("FASHION-MNIST", "fashion", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "FashionMNIST").touch()
    found = places(DATASETS["rotated_fashion"], [tmp_path, tmp_path / "gone"])
    assert found[:3] == [tmp_path / "fashion", tmp_path / "FASHION-MNIST", tmp_path]
    assert [str(place) for place in found[3:]] == ["/usr/share/datasets/fashion-mnist"]
    assert places(DATASETS["digits"], [tmp_path]) == []


def test_the_data_folder_itself_is_not_searched_through_without_a_sign(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path / "my pictures", trees.files(PACS))
    assert find_tree(PACS, [tmp_path]) is None


def test_the_data_folder_may_be_dassls_own(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path, trees.files(PACS, prefix="images/"))
    assert find_tree(PACS, [tmp_path]) is not None


# --- Status -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(DATASETS))
def test_nothing_is_there(tmp_path: Path, name: str) -> None:
    entry = DATASETS[name]
    if isinstance(entry.source, Arrays):
        entry = replace(entry, source=replace(entry.source, elsewhere=()))
    found = status(entry, [tmp_path, tmp_path / "gone"])
    assert found.state == ("built in" if isinstance(entry.source, BuiltIn) else "missing")
    if found.state == "missing":
        assert (found.where, found.found, found.notes) == ("", {}, ())


@pytest.mark.parametrize(
    "name", [n for n in DATASETS if isinstance(DATASETS[n].source, Tree) and not needs_lists(DATASETS[n])]
)
def test_counts_decide_between_found_and_incomplete(trees: Trees, tmp_path: Path, name: str) -> None:
    entry = DATASETS[name]
    root = trees.write(tmp_path / entry.source.folders[0], trees.files(entry, count=1))
    each = len(entry.classes)
    full = status(small(entry, 1), [tmp_path])
    assert full.state == "found"
    assert full.where == str(root)
    assert full.layout == "DomainBed"
    assert full.found == dict.fromkeys(entry.domains, each)
    (root / entry.domains[1] / entry.classes[0] / "img10.png").unlink()
    less = status(small(entry, 1), [tmp_path])
    assert less.state == "incomplete"
    assert less.found == dict.fromkeys(entry.domains, each) | {entry.domains[1]: each - 1}
    assert status(entry, [tmp_path]).state == "incomplete"


def test_a_missing_domain_counts_nothing(trees: Trees, tmp_path: Path) -> None:
    files = {name: data for name, data in trees.files(PACS).items() if not name.startswith("photo")}
    trees.write(tmp_path / "PACS", files)
    found = status(small(PACS, 2), [tmp_path])
    assert found.state == "incomplete"
    assert found.found["photo"] == 0


def test_another_known_version_is_found_and_said(trees: Trees, tmp_path: Path) -> None:
    entry = DATASETS["terra_incognita"]
    later = {"later download": dict.fromkeys(entry.domains, 10)}
    entry = replace(entry, counts=dict.fromkeys(entry.domains, 11), other_counts=later)
    trees.write(tmp_path / "terra", trees.files(entry, count=1))
    found = status(entry, [tmp_path])
    assert (found.state, found.notes) == ("found", ("the counts are those of the later download",))


def test_strangers_and_missing_lists_are_noted(trees: Trees, tmp_path: Path) -> None:
    extra = {"kfold/photo/unicorn/1.png": b"", "other/1.png": b""}
    trees.write(tmp_path / "PACS", trees.files(PACS, prefix="kfold/") | extra)
    notes = status(PACS, [tmp_path]).notes
    assert notes[0] == "2 other images were left out, as kfold/photo/unicorn/1.png"
    assert notes[1].startswith(
        "the official lists (art_painting_train_kfold.txt, ...) were not found: put them"
    )


def test_arrays_are_counted(tmp_path: Path) -> None:
    entry = DATASETS["rotated_mnist"]
    folder = tmp_path / "MNIST"
    folder.mkdir()
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3, *[0, 0, 0, 1] * 3, 0]))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 0]))
    found = status(entry, [tmp_path])
    assert found.state == "incomplete"
    assert found.found != dict(entry.counts)


def cifar(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        (folder / f"{name}.bin").touch()


def test_cifar_without_its_corruptions_is_incomplete_and_says_what_to_do(tmp_path: Path) -> None:
    cifar(tmp_path / "cifar10" / "cifar-10-batches-bin")
    found = status(DATASETS["cifar10_c"], [tmp_path])
    assert found.state == "incomplete"
    assert "get CIFAR-10-C" in found.notes[0]
    assert "regenerate=yes" in found.notes[0]


def test_cifar_with_one_of_its_corruptions_is_incomplete(tmp_path: Path) -> None:
    cifar(tmp_path / "cifar10" / "cifar-10-batches-bin")
    (tmp_path / "CIFAR-10-C").mkdir()
    for name in ("labels", "fog"):
        (tmp_path / "CIFAR-10-C" / f"{name}.npy").touch()
    assert status(DATASETS["cifar10_c"], [tmp_path]).state == "incomplete"


# --- What to put where ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(DATASETS))
def test_how_to_get_says_what_to_put_where_in_one_line(name: str) -> None:
    entry = DATASETS[name]
    line = how_to_get(entry, Path("/data"))
    assert "\n" not in line
    if isinstance(entry.source, BuiltIn):
        assert line == f"{name} comes with vicinal"
        return
    assert line.startswith(f"vicinal data get {name}, or put ")
    assert f"into '/data/{entry.source.folders[0]}'" in line
    assert line.endswith(f"; from {entry.home}")
    assert how_to_get(replace(entry, downloads=()), Path("/data")).startswith("put ")


def test_following_the_advice_makes_it_found(trees: Trees, tmp_path: Path) -> None:
    """The template that the line names is one that is found."""
    line = how_to_get(PACS, tmp_path)
    assert "as art_painting/dog/*.jpg" in line
    assert f"'{tmp_path / 'PACS'}'" in line
    trees.write(tmp_path / "PACS", trees.files(PACS))
    assert status(small(PACS, 2), [tmp_path]).state == "found"


def test_mini_domainnets_lists_are_part_of_the_advice() -> None:
    line = how_to_get(DATASETS["mini_domainnet"], Path("/data"))
    assert "and the lists ({domain}_{part}.txt) into '/data/domain_net/splits_mini'" in line
