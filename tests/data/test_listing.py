import time
from pathlib import Path
from typing import Any

import pytest

from vicinal.data.catalog import DATASETS
from vicinal.data.files import ImageFile
from vicinal.data.folder import list_folder
from vicinal.data.images import Decoding
from vicinal.data.layouts import Item
from vicinal.data.listing import Listing, decode_listing, in_order
from vicinal.data.load import list_entry
from vicinal.errors import DataError

Trees = Any  # of conftest.py


@pytest.fixture
def listing(trees: Trees, tmp_path: Path) -> Listing:
    """Two domains of two classes, listed in a wild order; pixel numbers count the items."""
    names = ["b/dog/10.png", "a/cat/2.png", "b/dog/9.png", "a/dog/1.png", "b/cat/x/1.png", "a/cat/10.png"]
    parts = ["train", "val", "val", "train", "test", "test"]
    trees.write(tmp_path, {name: trees.pixel(number=k) for k, name in enumerate(names)})
    items = [
        Item(name[0], int("dog" in name), ImageFile(name, str(tmp_path / name)), part)
        for name, part in zip(names, parts, strict=True)
    ]
    return Listing("pets", ("cat", "dog"), ("b", "a"), tuple(items), facts={"layout": "wild"})


def test_domains_are_decoded_in_their_order_and_images_in_theirs(listing: Listing, tmp_path: Path) -> None:
    data = decode_listing(listing, Decoding(1, 3), tmp_path / "cache")
    assert list(data.domains) == ["b", "a"]
    b, a = data.domains.values()
    assert b.paths == ("b/cat/x/1.png", "b/dog/9.png", "b/dog/10.png")
    assert b.images[:, 2, 0, 0].tolist() == [4, 2, 0]
    assert b.labels.tolist() == [0, 1, 1]
    assert (b.train.tolist(), b.val.tolist(), b.test.tolist()) == ([2], [1], [0, 1, 2])
    assert a.images[:, 2, 0, 0].tolist() == [1, 5, 3]
    assert data.facts == {"layout": "wild", "size": 1, "fit": "crop"}


def test_a_target_may_be_the_test_part_alone(listing: Listing, tmp_path: Path) -> None:
    only = Listing(listing.name, listing.classes, listing.domains, listing.items, "test")
    data = decode_listing(only, Decoding(1, 3), tmp_path / "cache")
    assert [domain.test.tolist() for domain in data.domains.values()] == [[0], [1]]


def test_progress_counts_over_all_domains(listing: Listing, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    decode_listing(listing, Decoding(1, 3), tmp_path / "cache", progress=lambda *done: seen.append(done))
    assert seen == [(done, 6) for done in range(1, 7)]


def test_bad_images_leave_labels_parts_and_paths_in_step(listing: Listing, tmp_path: Path) -> None:
    (tmp_path / "b/dog/9.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"b/dog/9\.png: the file is empty"):
        decode_listing(listing, Decoding(1, 3), tmp_path / "cache")
    data = decode_listing(listing, Decoding(1, 3), tmp_path / "cache", skip_bad=True)
    b = data.domains["b"]
    assert b.paths == ("b/cat/x/1.png", "b/dog/10.png")
    assert b.images[:, 2, 0, 0].tolist() == [4, 0]
    assert (b.train.tolist(), b.val.tolist(), b.test.tolist()) == ([1], [], [0, 1])
    assert len(data.bad) == 1
    (tmp_path / "b/dog/10.png").write_text("x")
    with pytest.raises(DataError, match="class 'dog' of domain 'b' has no readable image: add one"):
        decode_listing(listing, Decoding(1, 3), tmp_path / "cache", skip_bad=True)


def test_one_order_whatever_the_order_was(listing: Listing) -> None:
    twin = Item("b", 1, ImageFile("b/dog/copy/9.png", "x"))
    items = [*listing.items, twin]
    ordered = in_order(items)
    assert (
        ordered == in_order(reversed(items)) == in_order(sorted(items, key=lambda item: item.file.name[-3:]))
    )
    names = [item.file.name for item in ordered]
    assert names.index("b/dog/9.png") < names.index("b/dog/copy/9.png") < names.index("b/dog/10.png")


def test_a_hundred_thousand_files(trees: Trees, tmp_path: Path) -> None:
    """Each class folder is a link to one folder of 50 images: 103,500 files to list, match and divide."""
    entry = DATASETS["domainnet"]
    store = trees.write(tmp_path / "store", {f"{k}.png": trees.pixel(number=k) for k in range(50)})
    root = tmp_path / "data" / "domain_net"
    for domain in entry.domains:
        (root / domain).mkdir(parents=True)
        for name in entry.classes:
            (root / domain / name).symlink_to(store)
    start = time.perf_counter()
    named = list_entry(entry, [tmp_path / "data"])
    took = time.perf_counter() - start
    own = list_folder(root)
    for listing, val in ((named, 10), (own, 10)):
        assert len(listing.items) == 50 * 345 * 6
        assert len({item.file.name for item in listing.items}) == 50 * 345 * 6
        items = listing.of("real")
        assert [item.label for item in items] == [label for label in range(345) for _ in range(50)]
        assert [item.file.name.rsplit("/", 1)[1] for item in items[:3]] == ["0.png", "1.png", "2.png"]
        assert sum(item.part == "val" for item in items) == val * 345
    assert took < 30  # a few seconds on one idle core; a slip that makes it quadratic takes minutes
