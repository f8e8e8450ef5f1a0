import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vicinal.data.domains import DomainSet, assign_roles
from vicinal.data.load import load_dataset
from vicinal.errors import ConfigError, VicinalError

Trees = Any  # of conftest.py
Load = Callable[..., DomainSet]

ROWS = ["0.png,dog,b", "1.png,cat,b", "2.png,dog,a", "3.png,cat,a", "deep/4.png,cat,a"]
GOOD = "\n".join(["path,label,domain", *ROWS])


@pytest.fixture
def table(trees: Trees, tmp_path: Path) -> Load:
    """Return a loader of a table of that text, beside six images that count themselves."""
    names = ["0.png", "1.png", "2.png", "3.png", "deep/4.png", "5.png"]
    trees.write(tmp_path / "own", {name: trees.pixel(number=k) for k, name in enumerate(names)})

    def load(text: str | bytes, **options: Any) -> DomainSet:
        path = tmp_path / "own" / "birds.csv"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return load_dataset(str(path), 1, 3, **options)

    return load


def line(table: Load, text: str | bytes, **options: Any) -> str:
    """Return the one line by which a table is refused."""
    with pytest.raises(VicinalError) as caught:
        table(text, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_table_becomes_domains(table: Load) -> None:
    data = table(GOOD)
    assert (data.name, data.classes, tuple(data.domains)) == ("birds", ("cat", "dog"), ("a", "b"))
    first, second = data.domains.values()
    assert first.paths == ("3.png", "deep/4.png", "2.png")
    assert first.images[:, 2, 0, 0].tolist() == [3, 4, 2]
    assert first.labels.tolist() == [0, 0, 1]
    assert second.images[:, 2, 0, 0].tolist() == [1, 0]
    assert first.test.tolist() == [0, 1, 2]
    assert sorted([*first.train.tolist(), *first.val.tolist()]) == [0, 1, 2]
    assert first.labels[first.val].tolist() == [0]
    assert data.facts["layout"] == "table"
    assert data.facts["split"] == "stored, 0.2 of every class for validation"


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + GOOD,
        GOOD.replace("\n", "\r\n") + "\r\n\r\n",
        GOOD.replace("0.png,dog", '"0.png" ,  dog '),
        "\n".join(f"{k},{row}" for k, row in enumerate(GOOD.splitlines())),
        "\n".join(["domain,label,path", *(",".join(row.split(",")[::-1]) for row in ROWS)]),
    ],
    ids=["bom", "windows", "blanks", "more columns", "other order"],
)
def test_forms_that_say_the_same(table: Load, trees: Trees, text: str) -> None:
    trees.same(table(text), table(GOOD))


def test_paths_may_be_absolute_or_lead_up(table: Load, tmp_path: Path) -> None:
    (tmp_path / "own" / "0.png").rename(tmp_path / "up.png")
    (tmp_path / "own" / "1.png").rename(tmp_path / "far.png")
    text = GOOD.replace("0.png", "../up.png").replace("1.png", str(tmp_path / "far.png"))
    assert table(text).domains["b"].images[:, 2, 0, 0].tolist() == [1, 0]


def test_names_in_two_spellings_of_one_unicode_name_are_one(table: Load) -> None:
    composed, parted = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    rows = GOOD.replace("dog,a", f"{parted},a").replace("dog,b", f"{composed},b")
    assert table(rows).classes == ("café", "cat")
    rows = GOOD.replace(",a", f",{parted}", 1).replace(",a", f",{composed}")
    assert set(table(rows).domains) == {"café", "b"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "birds.csv' has no column path, label, domain: its first line must name path, label and domain"),
        ("", "label and domain, and the file is empty"),
        ("\n".join(ROWS), "has no column path, label, domain"),
        ("\n".join(ROWS), "label and domain, and it names 0.png, dog, b"),
        (GOOD.replace(",", ";"), "has no column path, label, domain"),
        (GOOD.replace(",", ";"), "and it names path;label;domain; columns are separated by commas"),
        (GOOD.replace(",", "\t"), "and it names path label domain; columns are separated by commas"),
        (GOOD.replace("domain", "Domain"), "has no column domain"),
        (GOOD.replace("domain", "Domain"), "it names path, label, Domain; names are in small letters"),
        ("x" * 200, f"and it names {'x' * 80}..."),
        ("path,label,domain\n", "birds.csv' names no images"),
        (GOOD + "\n,dog,a", "birds.csv', line 7: no path"),
        (GOOD + "\n5.png,,", "birds.csv', line 7: no label, domain"),
        (GOOD + "\n5.png", "line 7: no label, domain"),
        (GOOD + "\n5.png,  ,a", "line 7: no label"),
        (GOOD + "\n0.png,dog,b", "line 7: '0.png' was already named in line 2"),
        (GOOD + "\n./deep//4.png,dog,b", "line 7: 'deep/4.png' was already named in line 6"),
        (GOOD.replace(",b", ",a"), "names 1 domain: vicinal needs two or more"),
        (
            GOOD.replace("dog,b", "cat,b"),
            "the domains must have the same classes, but 'dog' is missing from b",
        ),
        (GOOD.replace("dog,b", "Dog,b"), "'Dog' is missing from a"),
        (GOOD.replace("dog", "café").encode("latin-1"), "is not a CSV file in UTF-8"),
        (GOOD.encode("utf-16"), "is not a CSV file in UTF-8"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "is not a CSV file in UTF-8"),
        (GOOD + '\n"5.png,dog,a\n', "line 7: no label, domain"),
        (GOOD + '\n"' + "5" * 200_000, "field larger than field limit"),
    ],
)
def test_what_is_wrong_is_one_clear_line(table: Load, text: str | bytes, said: str) -> None:
    assert said in line(table, text)


def test_files_that_are_missing_are_named_at_once_before_any_is_decoded(table: Load) -> None:
    def decoded(done: int, total: int) -> None:
        raise AssertionError("it decodes")

    text = GOOD + "\ngone.png,dog,a\ndeep/far.png,cat,b"
    said = line(table, text, progress=decoded)
    assert "2 of 7 images of" in said
    assert "birds.csv' are not there: deep/far.png, gone.png; paths are relative to its folder" in said
    assert "--skip-bad" in said
    many = "\n".join([GOOD, *(f"gone{k}.png,dog,a" for k in range(12))])
    assert "gone9.png and 2 more;" in line(table, many)


def test_a_file_that_is_missing_is_a_bad_image(table: Load) -> None:
    text = GOOD + "\ngone.png,dog,a"
    data = table(text, skip_bad=True)
    assert len(data.bad) == 1
    assert data.domains["a"].paths == ("3.png", "deep/4.png", "2.png")


def test_a_class_whose_only_image_of_a_domain_is_missing(table: Load) -> None:
    text = GOOD.replace("0.png", "gone.png")
    assert "class 'dog' of domain 'b' has no readable image" in line(table, text, skip_bad=True)


def test_a_path_with_a_null_byte_is_one_line(table: Load) -> None:
    line(table, GOOD + "\n5\0.png,dog,a")


# --- A column of parts ------------------------------------------------------------------------------------

PARTED = "path,label,domain,split\n" + "\n".join(
    f"{k}.png,{('cat', 'dog')[k % 2]},{'ab'[k // 2 % 2]},{part}"
    for k, part in enumerate(["train", "val", "test", "test", "test", "train", "val", ""])
)


@pytest.fixture
def eight(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path / "own", {f"{k}.png": trees.pixel(number=k) for k in range(8)})


@pytest.mark.usefixtures("eight")
def test_a_split_column_takes_the_place_of_the_stored_split(table: Load, tmp_path: Path) -> None:
    data = table(PARTED)
    shown = {
        name: {
            part: domain.images[getattr(domain, part), 2, 0, 0].tolist() for part in ("train", "val", "test")
        }
        for name, domain in data.domains.items()
    }
    assert shown == {
        "a": {"train": [0, 5], "val": [1], "test": [4]},
        "b": {"train": [7], "val": [6], "test": [2, 3]},
    }
    assert data.facts["split"] == "column of the table"
    assert not (tmp_path / "own" / ".vicinal").exists()


@pytest.mark.usefixtures("eight")
def test_without_a_test_part_a_target_is_everything(table: Load) -> None:
    data = table(PARTED.replace(",test", ",train"))
    assert all(domain.test.tolist() == [0, 1, 2, 3] for domain in data.domains.values())


def test_an_empty_split_column_is_as_none(table: Load, trees: Trees, tmp_path: Path) -> None:
    text = GOOD.replace("domain\n", "domain,split\n").replace(",a", ",a,").replace(",b", ",b,")
    trees.same(table(text), table(GOOD))
    assert (tmp_path / "own" / ".vicinal").is_dir()


@pytest.mark.parametrize("part", ["dev", "Train", "validation", "0"])
def test_an_unknown_part_is_named(table: Load, part: str) -> None:
    text = f"path,label,domain,split\n0.png,cat,a,train\n1.png,cat,b,{part}\n"
    assert line(table, text).endswith(f"line 3: split '{part}' is none of train, val, test")


def test_a_target_without_test_images_is_refused(table: Load) -> None:
    text = (
        "path,label,domain,split\n0.png,cat,a,train\n1.png,cat,b,test\n2.png,cat,c,train\n3.png,cat,d,val\n"
    )
    data = table(text)
    with pytest.raises(VicinalError):
        assign_roles(data, ["a"])


# --- The stored split -------------------------------------------------------------------------------------


def test_the_split_stays_when_rows_move_and_come(table: Load, trees: Trees) -> None:
    rows = [f"{k}.png,{('cat', 'dog')[k % 2]},{'ab'[k // 2 % 2]}" for k in range(6)]
    before = table(
        "\n".join(["path,label,domain", *rows[:5]]).replace("4.png", "deep/4.png"), val_fraction=0.5
    )
    moved = table(
        "\n".join(["path,label,domain", *rows[4::-1]]).replace("4.png", "deep/4.png"), val_fraction=0.5
    )
    trees.same(before, moved)
    more = table(
        "\n".join(["path,label,domain", *rows[::-1]]).replace("4.png", "deep/4.png"), val_fraction=0.5
    )
    for name, domain in before.domains.items():
        kept = {domain.paths[position] for position in domain.val.tolist()}
        now = more.domains[name]
        assert kept <= {now.paths[position] for position in now.val.tolist()}
        assert not kept & {now.paths[position] for position in now.train.tolist()}


def test_options_and_shares_that_make_no_sense(table: Load) -> None:
    with pytest.raises(ConfigError, match="validation fraction"):
        table(GOOD, val_fraction=1.0)
    with pytest.raises(ConfigError, match="own data have no options: angles"):
        table(GOOD, options={"angles": "0"})
