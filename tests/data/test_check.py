import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vicinal.data.catalog import DATASETS
from vicinal.data.check import Check, DomainCheck, check
from vicinal.data.entries import DatasetEntry
from vicinal.data.load import list_entry
from vicinal.data.rotated import RotatedOptions
from vicinal.errors import DataError

MakeTree = Callable[..., Path]
Trees = Any  # of conftest.py
Patch = Callable[..., DatasetEntry]


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Patch:
    """Return a changer of catalog entries, so that a small tree can be complete."""

    def change(name: str, **changes: Any) -> DatasetEntry:
        entry = replace(DATASETS[name], **changes)
        monkeypatch.setitem(DATASETS._things, name, entry)
        return entry

    return change


@pytest.fixture
def pacs(trees: Trees, tmp_path: Path, catalog: Patch) -> Path:
    """Return the folder of a PACS of three images a class, which the catalog takes for complete."""
    each = dict.fromkeys(DATASETS["pacs"].domains, (3,) * 7)
    entry = catalog("pacs", counts=dict.fromkeys(each, 21), class_counts=each)
    root: Path = trees.write(tmp_path / "PACS", trees.files(entry, count=3))
    trees.lists(root / "splits", entry, {"train": (10, 11), "crossval": (2,), "test": (2, 10, 11)}, first=1)
    return root


def test_a_complete_set_is_sound(pacs: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = check("pacs", pacs.parent, lambda done, total: seen.append((done, total)))
    assert found.sound
    assert (found.bad, found.notes, found.split) == ((), (), "official lists")
    assert [domain.name for domain in found.domains] == list(DATASETS["pacs"].domains)
    for domain in found.domains:
        assert domain.found == domain.expected == (3,) * 7
        assert domain.parts == (14, 7, 21)
    assert seen == [(done, 84) for done in range(1, 85)]


def test_every_bad_image_is_found_and_counts_as_missing(pacs: Path) -> None:
    (pacs / "photo" / "dog" / "img2.png").write_bytes(b"")
    (pacs / "sketch" / "person" / "img10.png").write_text("<html>")
    whole = (pacs / "cartoon" / "house" / "img11.png").read_bytes()
    (pacs / "cartoon" / "house" / "img11.png").write_bytes(whole[:40])
    found = check("pacs", pacs.parent)
    assert not found.sound
    assert len(found.bad) == 3
    for name, why in (
        ("photo/dog/img2.png", "the file is empty"),
        ("sketch/person/img10.png", "not an image"),
        ("cartoon/house/img11.png", ""),
    ):
        assert sum(f"{name}: {why}" in line for line in found.bad) == 1
    domains = {domain.name: domain for domain in found.domains}
    assert domains["photo"].found == (2, 3, 3, 3, 3, 3, 3)
    assert domains["photo"].parts == (14, 6, 20)
    assert [domain.complete for domain in found.domains] == [True, False, False, False]


def test_a_missing_class_and_extra_images_are_differences_not_errors(pacs: Path) -> None:
    for path in (pacs / "photo" / "dog").iterdir():
        path.unlink()
    extra = pacs / "photo" / "horse" / "img9.png"
    extra.write_bytes((pacs / "photo" / "horse" / "img2.png").read_bytes())
    found = check("pacs", pacs.parent)
    photo = next(domain for domain in found.domains if domain.name == "photo")
    assert photo.found == (0, 3, 3, 3, 4, 3, 3)
    assert not photo.complete
    assert not found.sound
    assert "1 images are in no list" in found.notes


def test_archives_are_checked_as_folders_are(trees: Trees, pacs: Path, tmp_path: Path) -> None:
    files = trees.files(DATASETS["pacs"], count=3)
    trees.archive(tmp_path / "packed" / "PACS.zip", files | {"photo/dog/img2.png": b""})
    found = check("pacs", tmp_path / "packed")
    assert [line.split(":", 1)[1] for line in found.bad] == ["photo/dog/img2.png: the file is empty"]
    assert any("official lists" in note for note in found.notes)


def test_counts_of_a_domain_or_of_another_version_are_enough(
    trees: Trees, tmp_path: Path, catalog: Patch
) -> None:
    domains = DATASETS["terra_incognita"].domains
    catalog(
        "terra_incognita",
        counts=dict.fromkeys(domains, 11),
        other_counts={"later": dict.fromkeys(domains, 10)},
    )
    root = trees.write(tmp_path / "terra", trees.files(DATASETS["terra_incognita"], count=1))
    assert check("terra_incognita", tmp_path).sound
    (root / "location_38" / "dog" / "img10.png").unlink()
    found = check("terra_incognita", tmp_path)
    assert not found.sound
    assert [domain.expected for domain in found.domains] == [(10,), (11,), (10,), (10,)]


def test_the_real_catalog_refuses_a_tiny_tree(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path / "VLCS", trees.files(DATASETS["vlcs"]))
    found = check("vlcs", tmp_path)
    assert not found.sound
    assert found.bad == ()
    assert [domain.expected for domain in found.domains] == [(1415,), (2656,), (3282,), (3376,)]


def test_own_data_have_no_counts_to_differ_from(make_tree: MakeTree) -> None:
    root = make_tree(count=5)
    found = check(str(root))
    assert found.sound
    assert (found.name, found.classes) == ("pets", ("cat", "dog"))
    assert found.domains[0] == DomainCheck("a", (5, 5), None, (8, 2, 10))
    (root / "a" / "cat" / "1.png").write_bytes(b"")
    found = check(str(root))
    assert not found.sound
    assert len(found.bad) == 1
    assert found.domains[0].found == (4, 5)


def test_a_table_is_checked(make_tree: MakeTree) -> None:
    root = make_tree()
    rows = [f"{d}/{c}/{k}.png,{c},{d}" for d in "ab" for c in ("cat", "dog") for k in range(3)]
    (root / "t.csv").write_text("\n".join(["path,label,domain", *rows, "gone.png,cat,a"]))
    found = check(str(root / "t.csv"))
    assert [domain.found for domain in found.domains] == [(3, 3), (3, 3)]
    assert len(found.bad) == 1
    assert "gone.png" in found.bad[0]


def test_arrays_are_loaded_and_counted(tmp_path: Path, catalog: Patch) -> None:
    for part, count in (("train", 40), ("t10k", 20)):
        for kind, shape in (("images", (count, 28, 28)), ("labels", (count,))):
            head = bytes([0, 0, 8, len(shape)]) + b"".join(struct.pack(">I", n) for n in shape)
            body = bytes(count * 784) if kind == "images" else bytes(k % 10 for k in range(count))
            path = tmp_path / "MNIST" / f"{part}-{kind}-idx{len(shape)}-ubyte"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(head + body)
    domains = DATASETS["rotated_mnist"].domains
    catalog("rotated_mnist", options=RotatedOptions(train=30, val=10), counts=dict.fromkeys(domains, 60))
    found = check("rotated_mnist", tmp_path)
    assert found.sound
    assert found.domains[0] == DomainCheck("0", (6,) * 10, (60,), (30, 10, 20))
    catalog("rotated_mnist", counts=dict.fromkeys(domains, 61))
    assert not check("rotated_mnist", tmp_path).sound


def test_what_comes_with_vicinal_is_sound() -> None:
    found = check("digits")
    assert found.sound
    assert sum(sum(domain.found) for domain in found.domains) == 7 * 1797


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pacs was not found in"):
        check("pacs", tmp_path)
    with pytest.raises(DataError, match="unknown dataset 'pcas'"):
        check("pcas", tmp_path)


def test_sound_means_no_bad_image_and_no_difference() -> None:
    good = DomainCheck("a", (1, 2), (3,), (3, 0, 3))
    assert Check("x", ("c", "d"), (good,), (), (), "").sound
    assert not Check("x", ("c", "d"), (good,), ("a.png: why",), (), "").sound
    assert not Check("x", ("c", "d"), (replace(good, expected=(2, 1)),), (), (), "").sound
    assert replace(good, expected=(1, 2)).complete
    assert replace(good, expected=None).complete
    assert not replace(good, expected=(4,)).complete


REAL = Path(os.environ.get("VICINAL_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.skipif(
    not (REAL / "pacs-photo.tar").is_file(), reason="the tars of PACS are not there (VICINAL_TEST_DATA)"
)
def test_some_real_pictures_decode(tmp_path: Path, trees: Trees, catalog: Patch) -> None:
    """Not all of them, which takes minutes: the first of every class of every domain."""
    listing = list_entry(DATASETS["pacs"], [REAL])
    first = {(item.domain, item.label): item for item in reversed(listing.items)}
    assert len(first) == 28
    trees.write(tmp_path / "PACS", {item.file.name: item.file.read() for item in first.values()})
    each = dict.fromkeys(listing.domains, (1,) * 7)
    catalog("pacs", counts=dict.fromkeys(each, 7), class_counts=each)
    assert check("pacs", tmp_path).sound
