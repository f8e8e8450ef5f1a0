import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from vicinal.data.files import ImageFile
from vicinal.data.layouts import Annotations, Item, Layout, Names, counts, match, match_layout, plain
from vicinal.errors import DataError

NAMES = Names(
    ("Real_World", "clipart"), ("t-shirt", "cat"), {"Real_World": ("Real", "RW")}, {"cat": ("1", "Katze")}
)
PLAIN = Layout("plain")
PARTED = Layout("parted", "{domain}/train|test/{label}/{file}")


def files(*names: str) -> list[ImageFile]:
    return [ImageFile(name, f"/data/{name}") for name in names]


def placed(items: tuple[Item, ...]) -> list[tuple[str, int, str]]:
    return [(item.domain, item.label, item.file.name) for item in items]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Real World", "real_world"),
        ("REAL-WORLD", "Real_World"),
        ("Real \t World", "real world"),
        (unicodedata.normalize("NFD", "Café"), unicodedata.normalize("NFC", "CAFÉ")),
        ("Straße", "STRASSE"),
    ],
)
def test_spellings_that_are_one(one: str, other: str) -> None:
    assert plain(one) == plain(other)


@pytest.mark.parametrize(("one", "other"), [("RealWorld", "Real_World"), ("cat", "cats"), ("1", "01")])
def test_spellings_that_are_two(one: str, other: str) -> None:
    assert plain(one) != plain(other)


def test_names_know_their_other_spellings() -> None:
    assert NAMES.domain_of() == {
        "real_world": "Real_World",
        "real": "Real_World",
        "rw": "Real_World",
        "clipart": "clipart",
    }
    assert NAMES.label_of() == {"t_shirt": 0, "cat": 1, "1": 1, "katze": 1}


def test_a_plain_layout_under_any_folder() -> None:
    found = match_layout(PLAIN, files("x/y/RW/T-Shirt/a.png", "x/y/Clipart/katze/b.png"), NAMES)
    assert (found.layout, found.prefix, found.strangers) == ("plain", "x/y", 0)
    assert placed(found.items) == [
        ("Real_World", 0, "x/y/RW/T-Shirt/a.png"),
        ("clipart", 1, "x/y/Clipart/katze/b.png"),
    ]


@pytest.mark.parametrize(
    "name",
    ["clipart/a.png", "cat/a.png", "a.png", "cat/clipart/a.png", "clipart/cat/more/a.png", "x/cat/a.png"],
)
def test_images_that_a_layout_has_no_place_for(name: str) -> None:
    assert match_layout(PLAIN, files(name), NAMES).items == ()
    assert match([PLAIN, PARTED], files(name), NAMES) is None


def test_the_folder_with_most_images_counts_and_the_rest_are_strangers() -> None:
    names = ["new/clipart/cat/1.png", "new/RW/cat/1.png", "old/clipart/cat/1.png", "x.png", "y.png", "z.png"]
    found = match_layout(PLAIN, files(*names), NAMES)
    assert found.prefix == "new"
    assert len(found.items) == 2
    assert found.strangers == 4
    assert found.examples == ("old/clipart/cat/1.png", "x.png", "y.png")


def test_the_shorter_of_two_equal_folders_counts() -> None:
    found = match_layout(PLAIN, files("copy/clipart/cat/1.png", "clipart/cat/1.png"), NAMES)
    assert found.prefix == ""


def test_alternatives_stand_for_any_of_their_folders() -> None:
    names = ["clipart/train/cat/1.png", "clipart/Test/cat/2.png", "clipart/val/cat/3.png"]
    found = match_layout(PARTED, files(*names), NAMES)
    assert [item.file.name for item in found.items] == names[:2]
    assert found.examples == ("clipart/val/cat/3.png",)


def test_the_layout_that_places_most_wins_and_the_first_of_equals() -> None:
    two = files("clipart/train/cat/1.png", "clipart/test/cat/1.png", "clipart/cat/1.png")
    found = match([PLAIN, PARTED], two, NAMES)
    assert found is not None
    assert found.layout == "parted"
    again = match([Layout("one"), Layout("two")], two, NAMES)
    assert again is not None
    assert again.layout == "one"
    assert match([], two, NAMES) is None
    assert match([PLAIN], [], NAMES) is None


def test_counts_name_every_domain_and_class() -> None:
    items = match_layout(PLAIN, files("RW/cat/1.png", "RW/cat/2.png", "RW/t-shirt/1.png"), NAMES).items
    assert counts(items, NAMES) == {"Real_World": [1, 2], "clipart": [0, 0]}


# --- Annotations ------------------------------------------------------------------------------------------

ANNOTATIONS = Annotations("json", (("a.json", "b.json"), ("c.json",)), {"7": "clipart", "8": "Real_World"})


def annotate(path: Path, *rows: tuple[str, Any, str]) -> None:
    """Write a file of (file name, location, category)."""
    kinds = sorted({kind for _, _, kind in rows})
    content = {
        "images": [{"id": name, "file_name": f"some/{name}", "location": place} for name, place, _ in rows],
        "annotations": [{"image_id": name, "category_id": kinds.index(kind)} for name, _, kind in rows],
        "categories": [{"id": number, "name": kind} for number, kind in enumerate(kinds)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_the_first_complete_set_of_files_counts(tmp_path: Path) -> None:
    on_disk = files("deep/1.png", "2.png", "3.png")
    assert ANNOTATIONS.items(tmp_path, on_disk, NAMES) == ()
    annotate(tmp_path / "c.json", ("1.png", "7", "cat"))
    annotate(tmp_path / "deep" / "a.json", ("2.png", 8, "T-shirt"), ("3.png", 9, "cat"))
    assert placed(ANNOTATIONS.items(tmp_path, on_disk, NAMES)) == [("clipart", 1, "deep/1.png")]
    annotate(tmp_path / "deep" / "b.json", ("2.png", 8, "T-shirt"), ("1.png", 7, "dog"))
    assert placed(ANNOTATIONS.items(tmp_path, on_disk, NAMES)) == [("Real_World", 0, "2.png")]


def test_annotations_of_the_wrong_shape_are_one_line(tmp_path: Path) -> None:
    for content in ("", "[1, 2]", '{"categories": [{"id": 1}]}', '{"categories": [1]}', "{"):
        (tmp_path / "c.json").write_text(content)
        with pytest.raises(
            DataError, match=r"c\.json' is not the annotation file expected .*get it anew"
        ) as e:
            ANNOTATIONS.items(tmp_path, [], NAMES)
        assert "\n" not in str(e.value)
