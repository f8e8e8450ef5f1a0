import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vicinal.data.catalog import DATASETS
from vicinal.data.files import ImageFile
from vicinal.data.find import find_tree, status
from vicinal.data.layouts import Item, Names
from vicinal.data.load import load_dataset
from vicinal.data.splits import Lists, apply_lists, find_lists, seeded
from vicinal.errors import DataError

MakeTree = Callable[..., Path]
Trees = Any  # of conftest.py

NAMES = Names(("a", "b"), ("cat", "dog"))
LISTS = Lists("{domain}_{part}.txt", {"train": "train", "crossval": "val", "test": "test"}, 1, ("splits",))
PACS = DATASETS["pacs"]
OFFICIAL = {"train": (10, 11), "crossval": (2,), "test": (2, 10, 11)}


def item(name: str, label: int = 0, domain: str = "a", part: str = "") -> Item:
    return Item(domain, label, ImageFile(f"{domain}/{NAMES.classes[label]}/{name}", "/nowhere"), part)


def write_lists(folder: Path, lines: dict[str, str]) -> Path:
    """Write all six lists, those not given empty."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain in NAMES.domains:
        for part in LISTS.parts:
            (folder / f"{domain}_{part}.txt").write_text(lines.get(f"{domain}_{part}", ""))
    return folder


# --- Official lists -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "splits"])
def test_lists_are_found_in_a_place_or_in_their_folder(tmp_path: Path, place: str) -> None:
    folder = write_lists(tmp_path / place, {})
    assert find_lists(LISTS, [tmp_path / "gone", tmp_path], NAMES) == folder
    assert find_lists(LISTS, [tmp_path / "gone"], NAMES) is None


def test_lists_that_are_not_all_there_are_named(tmp_path: Path) -> None:
    folder = write_lists(tmp_path / "splits", {})
    for name in ("a_train", "b_test"):
        (folder / f"{name}.txt").unlink()
    with pytest.raises(DataError) as caught:
        find_lists(LISTS, [tmp_path], NAMES)
    assert str(caught.value) == f"'{folder}' lacks a_train.txt, b_test.txt: put all 6 official lists there"
    for name in ("a_crossval", "a_test"):
        (folder / f"{name}.txt").unlink()
    with pytest.raises(DataError, match=r"lacks a_train.txt, a_crossval.txt, a_test.txt, \.\.\.: put all 6"):
        find_lists(LISTS, [tmp_path], NAMES)


def test_lists_give_parts_and_say_what_does_not_agree(tmp_path: Path) -> None:
    lines = {
        "a_train": "any/where/a/cat/1.png 1\n\na/dog/1.png 2\n",
        "a_crossval": "a/cat/2.png 1\n",
        "a_test": "a/cat/1.png 1\na/cat/2.png 1\na/dog/1.png 2\na/cat/gone.png 1",
        "b_test": "B/Dog/only tested.png 2\n",
    }
    items = [
        item("1.png"),
        item("2.png"),
        item("1.png", 1),
        item("none.png"),
        item("only tested.png", 1, "b"),
    ]
    found, notes = apply_lists(LISTS, write_lists(tmp_path, lines), items, NAMES)
    assert [(one.file.name, one.part) for one in found] == [
        ("a/cat/1.png", "train"),
        ("a/cat/2.png", "val"),
        ("a/dog/1.png", "train"),
        ("a/cat/none.png", ""),
        ("b/dog/only tested.png", "test"),
    ]
    assert notes == ["a_test.txt: 1 of 4 images are missing, as gone.png", "1 images are in no list"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a/cat/1.png 2", "label 2 for class cat"),
        ("a/cat/1.png 0", "label 0 for class cat"),
        ("a/cow/1.png 1", "'cow'"),
        ("c/cat/1.png 1", "'c'"),
        ("a/cat/1.png", "not enough values"),
        ("cat/1.png 1", "not enough values"),
        ("a/cat/1.png one", "invalid literal"),
        ("<html>", "not enough values"),
    ],
)
def test_a_line_that_is_not_understood_is_named(tmp_path: Path, line: str, why: str) -> None:
    folder = write_lists(tmp_path, {"a_train": f"a/cat/0.png 1\n{line}\n"})
    with pytest.raises(DataError) as caught:
        apply_lists(LISTS, folder, [], NAMES)
    assert f"a_train.txt', line 2: '{line}' is not understood (" in str(caught.value)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX only")
def test_a_list_in_another_encoding_still_names_its_files(tmp_path: Path) -> None:
    folder = write_lists(tmp_path, {})
    (folder / "a_train.txt").write_bytes(b"\xef\xbb\xbfa/cat/caf\xe9.png 1\n")
    name = os.fsdecode(b"caf\xe9.png")
    found, notes = apply_lists(LISTS, folder, [item(name)], NAMES)
    assert (found[0].part, notes) == ("train", [])
    (folder / "a_train.txt").write_bytes(b"a/c\xe9/1.png 1\n")
    with pytest.raises(DataError, match="is not understood") as caught:
        apply_lists(LISTS, folder, [], NAMES)
    str(caught.value).encode()


def test_pacs_uses_the_official_lists(trees: Trees, tmp_path: Path) -> None:
    root = trees.write(tmp_path / "data" / "PACS", trees.files(PACS, prefix="kfold/", count=3))
    trees.lists(root / "splits", PACS, OFFICIAL, first=1)
    data = trees.load("pacs", tmp_path / "data")
    trees.check(data, PACS, 3)
    assert data.facts["split"] == "official lists"
    for domain in data.domains.values():
        assert set(domain.images[domain.val, 2, 0, 0].tolist()) == {2}
        assert set(domain.images[domain.train, 2, 0, 0].tolist()) == {10, 11}


@pytest.mark.parametrize("folder", PACS.source.split.lists.folders)
@pytest.mark.parametrize("beside", [False, True])
def test_pacs_lists_lie_in_the_folder_or_beside_it(
    trees: Trees, tmp_path: Path, folder: str, beside: bool
) -> None:
    root = trees.write(tmp_path / "PACS", trees.files(PACS))
    trees.lists((tmp_path if beside else root) / folder, PACS, OFFICIAL, first=1)
    found = find_tree(PACS, [tmp_path])
    assert found is not None
    assert found.split == "official lists"


@pytest.mark.parametrize("above", ["", "pacs/"])
def test_pacs_as_dassl_has_it_and_as_its_archive_unpacks(trees: Trees, tmp_path: Path, above: str) -> None:
    root = trees.write(tmp_path / "PACS", trees.files(PACS, prefix=f"{above}images/"))
    trees.lists(root / f"{above}splits", PACS, OFFICIAL, first=1)
    found = find_tree(PACS, [tmp_path])
    assert found is not None
    assert found.split == "official lists"
    assert {one.part for one in found.items} == {"train", "val"}


def test_pacs_from_tars_beside_its_lists(trees: Trees, tmp_path: Path) -> None:
    for domain in PACS.domains:
        files = {name: data for name, data in trees.files(PACS).items() if name.startswith(domain)}
        trees.archive(tmp_path / "data" / f"pacs-{domain}.tar", files)
    trees.lists(tmp_path / "data" / "pacs-splits", PACS, OFFICIAL, first=1)
    data = trees.load("pacs", tmp_path / "data")
    trees.check(data, PACS)
    assert set(data.domains["photo"].images[data.domains["photo"].val, 2, 0, 0].tolist()) == {2}


def test_pacs_without_lists_is_seeded_and_says_so(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path / "data" / "PACS", trees.files(PACS, count=3))
    found = status(PACS, [tmp_path / "data"])
    assert found.split == "seeded, 0.1 of every class for validation"
    [note] = found.notes
    assert "art_painting_train_kfold.txt" in note
    assert f"put them into '{tmp_path / 'data' / 'pacs-splits'}'" in note
    one, same, other = (trees.load("pacs", tmp_path / "data", seed=seed) for seed in (0, 0, 1))
    trees.same(one, same)
    assert any(one.domains[d].val.tolist() != other.domains[d].val.tolist() for d in PACS.domains)


def test_pacs_lists_that_do_not_agree_with_the_images(trees: Trees, tmp_path: Path) -> None:
    root = trees.write(tmp_path / "data" / "PACS", trees.files(PACS, count=3))
    trees.lists(root / "splits", PACS, {"train": (10,), "crossval": (2,), "test": (2, 10)}, first=1)
    (root / "photo" / "dog" / "img10.png").unlink()
    found = find_tree(PACS, [tmp_path / "data"])
    assert found is not None
    assert found.notes == (
        "photo_test_kfold.txt: 1 of 14 images are missing, as img10.png",
        "photo_train_kfold.txt: 1 of 7 images are missing, as img10.png",
        "28 images are in no list",
    )
    # What no list names still is an image of the set: it is divided by the seed.
    photo = trees.load("pacs", tmp_path / "data").domains["photo"]
    assert len(photo.images) == len(photo.train) + len(photo.val) == 20


def test_pacs_lists_missing_or_wrong_are_one_line(trees: Trees, tmp_path: Path) -> None:
    root = trees.write(tmp_path / "PACS", trees.files(PACS))
    folder = trees.lists(root / "splits", PACS, OFFICIAL, first=1)
    wrong = folder / "photo_train_kfold.txt"
    wrong.write_text("photo/dog/img10.png 0\n")
    with pytest.raises(DataError, match=r"photo_train_kfold.txt', line 1: .*label 0 for class dog"):
        load_dataset("pacs", 1, data_dir=tmp_path)
    wrong.unlink()
    with pytest.raises(DataError, match=r"splits' lacks photo_train_kfold.txt: put all 12 official lists"):
        load_dataset("pacs", 1, data_dir=tmp_path)


def test_domainnet_takes_what_its_lists_name_and_divides_by_seed(trees: Trees, tmp_path: Path) -> None:
    entry = DATASETS["domainnet"]
    root = trees.write(tmp_path / "domain_net", trees.files(entry, count=3))
    trees.lists(root / "splits", entry, {"train": (10,), "test": (2,)})
    found = find_tree(entry, [tmp_path])
    assert found is not None
    assert found.split == "official lists"
    assert len(found.items) == 2 * 345 * 6
    assert {one.part for one in found.items} == {""}
    assert {one.file.name.rsplit("/", 1)[1] for one in found.items} == {"img2.png", "img10.png"}


def test_mini_domainnet_takes_its_classes_out_of_the_full_set(trees: Trees, tmp_path: Path) -> None:
    full, mini = DATASETS["domainnet"], DATASETS["mini_domainnet"]
    files = trees.files(full, count=2)
    root = trees.write(tmp_path / "data" / "domain_net", files)
    with pytest.raises(DataError, match=r"mini_domainnet needs its lists: .*splits_mini'"):
        load_dataset("mini_domainnet", 1, data_dir=tmp_path / "data")
    trees.lists(root / "splits_mini", mini, {"train": (10,), "test": (2,)}, first=500)  # any label will do
    data = trees.load("mini_domainnet", tmp_path / "data")
    assert data.classes == mini.classes
    assert list(data.domains) == ["clipart", "painting", "real", "sketch"]
    for domain in data.domains.values():
        assert domain.labels.tolist() == [label for label in range(126) for _ in range(2)]
        shown = domain.images[:, :, 0, 0].long()
        classes = [full.classes[red + 256 * (green % 16)] for red, green, _ in shown.tolist()]
        assert classes == [mini.classes[label] for label in domain.labels.tolist()]
        assert set(shown[domain.train, 2].tolist()) == {10}
        assert set(shown[domain.val, 2].tolist()) == {2}
        assert len(domain.test) == 252


def test_mini_domainnet_without_its_lists_is_incomplete(trees: Trees, tmp_path: Path) -> None:
    entry = DATASETS["mini_domainnet"]
    trees.write(tmp_path / "domain_net", trees.files(entry, count=1))
    small = replace(entry, counts=dict.fromkeys(entry.domains, 126))
    found = status(small, [tmp_path])
    assert found.state == "incomplete"
    assert not any("seeded" in note for note in found.notes)


# --- Seeded and stored --------------------------------------------------------------------------------------


def test_seeded_divides_what_has_no_part_class_by_class() -> None:
    items = [item(f"{k}.png", k % 2) for k in range(20)] + [item("x.png", 0, part="test")]
    divided = seeded(items, 0.3, 0)
    assert [one.file for one in divided] == [one.file for one in items]
    for label in (0, 1):
        parts = [one.part for one in divided if one.label == label]
        assert (parts.count("train"), parts.count("val")) == (7, 3)
    assert divided[-1].part == "test"
    assert divided == seeded(items, 0.3, 0)
    assert divided != seeded(items, 0.3, 1)
    assert {one.part for one in seeded(items[:-1], 0, 0)} == {"train"}


def parts_of(root: Path, **options: Any) -> dict[str, str]:
    data = load_dataset(str(root), 2, 1, **options)
    return {
        domain.paths[position]: part
        for domain in data.domains.values()
        for part in ("train", "val")
        for position in getattr(domain, part).tolist()
    }


def test_the_split_is_stored_once_and_old_images_stay_when_new_ones_come(make_tree: MakeTree) -> None:
    root = make_tree(count=10)
    before = parts_of(root)
    [path] = (root / ".vicinal").iterdir()
    assert path.name == "split-seed0-val0.2.csv"
    lines = path.read_text().splitlines()
    assert lines[0] == "path,part"
    assert sorted(lines[1:]) == sorted(f"{name},{part}" for name, part in before.items())
    written = path.read_bytes()
    assert parts_of(root) == before
    assert path.read_bytes() == written
    for k in range(30):  # named so that they come between the old ones
        (root / "a" / "cat" / f"0{k}.png").write_bytes((root / "a" / "cat" / "0.png").read_bytes())
    after = parts_of(root)
    assert {name: after[name] for name in before} == before
    new = [part for name, part in after.items() if name not in before]
    assert (new.count("train"), new.count("val")) == (24, 6)
    assert parts_of(root) == after
    assert len(path.read_text().splitlines()) == 71


def test_images_that_went_come_back_to_their_part(make_tree: MakeTree, tmp_path: Path) -> None:
    root = make_tree(count=10)
    before = parts_of(root)
    gone = next(name for name, part in before.items() if part == "val")
    (root / gone).rename(tmp_path / "kept.png")
    assert gone not in parts_of(root)
    (tmp_path / "kept.png").rename(root / gone)
    assert parts_of(root) == before


def test_each_seed_and_share_has_a_split_of_its_own(make_tree: MakeTree) -> None:
    root = make_tree(count=10)
    zero, one, half = parts_of(root), parts_of(root, seed=1), parts_of(root, val_fraction=0.5)
    assert zero != one
    assert list(half.values()).count("val") == 20
    names = {"split-seed0-val0.2.csv", "split-seed1-val0.2.csv", "split-seed0-val0.5.csv"}
    assert {path.name for path in (root / ".vicinal").iterdir()} == names
    assert parts_of(root) == zero


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        b"path,part\na/cat/0.png\n",
        b"path,part\na/cat/0.png,test\n",
        b"path,part\n" + b"a" * 200_000,
    ],
)
def test_a_damaged_split_is_one_line(make_tree: MakeTree, content: bytes) -> None:
    root = make_tree()
    (root / ".vicinal").mkdir()
    path = root / ".vicinal" / "split-seed0-val0.2.csv"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        parts_of(root)
    assert str(caught.value) == f"'{path}' is damaged: remove it and the images are divided anew"
    path.unlink()
    assert len(parts_of(root)) == 12


def test_a_folder_that_cannot_be_written_gets_the_same_split(
    make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_tree(count=10)

    mkdir = Path.mkdir

    def refuse(self: Path, *args: Any, **options: Any) -> None:
        if self.name == ".vicinal":
            raise PermissionError(13, "Permission denied")
        mkdir(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        read_only = parts_of(root)
    assert not (root / ".vicinal").exists()
    assert parts_of(root) == read_only
    assert (root / ".vicinal").is_dir()


def test_names_with_commas_quotes_and_line_breaks_are_stored(make_tree: MakeTree) -> None:
    root = make_tree(count=6)
    for k, name in enumerate(("a,b.png", 'say "x".png', "two\nlines.png", "é 日.png")):
        (root / "a" / "cat" / f"{k}.png").rename(root / "a" / "cat" / name)
    before = parts_of(root)
    assert "a/cat/two\nlines.png" in before
    assert parts_of(root) == before
    (root / "a" / "cat" / "new.png").write_bytes((root / "a" / "dog" / "0.png").read_bytes())
    after = parts_of(root)
    assert {name: after[name] for name in before} == before
