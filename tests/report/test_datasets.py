import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from vicinal.data.catalog import DATASETS
from vicinal.data.check import Check, DomainCheck
from vicinal.data.find import Status
from vicinal.report.datasets import catalog_markdown, catalog_table, check_table, status_table

ENTRIES = [DATASETS[name] for name in DATASETS]


def printed(table: Table, width: int = 250) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(table)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def row(text: str, name: str) -> list[str]:
    """Return the cells of the first line of a row."""
    line = next(line for line in text.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


@pytest.mark.parametrize("name", list(DATASETS))
def test_the_catalog_has_a_row_for_each(name: str) -> None:
    entry = DATASETS[name]
    cells = row(printed(catalog_table(ENTRIES), 400), name)
    assert cells[0] == name
    assert cells[1] == f"{entry.images:,}"
    assert cells[2:4] == [str(len(entry.classes)), str(entry.size)]
    assert cells[4].startswith(", ".join(entry.domains[:4]))
    assert cells[5].startswith(entry.licence[:20])
    assert entry.home.split(" ")[0][:20] in cells[6]


def test_many_domains_are_cut_short() -> None:
    assert "and 9 more" in printed(catalog_table([DATASETS["cifar10_c"]]), 400)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_table_fits_a_narrow_terminal(width: int) -> None:
    statuses = [Status(entry, "missing") for entry in ENTRIES]
    checks = Check("pets", ("cat",), (DomainCheck("a", (3,), None, (2, 1, 3)),), (), (), "")
    for table in (catalog_table(ENTRIES), status_table(statuses), check_table(checks)):
        assert max(map(len, printed(table, width).splitlines())) <= width


def test_status_names_the_domains_that_differ() -> None:
    entry = DATASETS["pacs"]
    found = Status(
        entry, "incomplete", "/data/PACS", "DomainBed", "official lists", {**entry.counts, "photo": 1669}
    )
    text = printed(status_table([found]))
    assert row(text, "pacs") == [
        "pacs",
        "incomplete",
        "/data/PACS",
        "DomainBed",
        "official lists",
        "9,990 / 9,991",
    ]
    assert "photo 1,669 / 1,670" in text
    assert "sketch" not in text


def test_status_of_what_is_complete_missing_and_built_in() -> None:
    pacs, vlcs, digits = (DATASETS[name] for name in ("pacs", "vlcs", "digits"))
    text = printed(
        status_table(
            [
                Status(pacs, "found", "/d", found=dict(pacs.counts)),
                Status(vlcs, "missing"),
                Status(digits, "built in", found=dict(digits.counts)),
            ]
        )
    )
    assert row(text, "pacs")[-1] == "9,991 / 9,991"
    assert row(text, "vlcs") == ["vlcs", "missing", "", "", "", ""]
    assert row(text, "digits")[1] == "built in"


def test_more_images_than_the_catalog_has_are_a_difference_too() -> None:
    entry = DATASETS["vlcs"]
    found = Status(entry, "found", "/d", found={**entry.counts, "SUN09": 3283})
    assert "SUN09 3,283 / 3,282" in printed(status_table([found]))


def test_a_check_shows_parts_counts_and_classes() -> None:
    domains = (
        DomainCheck("photo", (1000, 2), (1000, 2), (900, 102, 1002)),
        DomainCheck("sketch", (3, 4), (3, 5), (5, 2, 7)),
        DomainCheck("own", (1, 1), None, (2, 0, 2)),
        DomainCheck("total", (1, 1), (3,), (2, 0, 2)),
    )
    text = printed(check_table(Check("pacs", ("dog", "cat"), domains, (), (), "official lists")))
    assert "pacs: 1,013 images decoded" in text
    assert row(text, "photo") == ["photo", "1,002", "1,002", "900", "102", "1,002", "dog 1000, cat 2"]
    assert row(text, "sketch") == ["sketch", "7", "8", "5", "2", "7", "differs: cat 4 of 5"]
    assert row(text, "own") == ["own", "2", "", "2", "0", "2", "dog 1, cat 1"]
    assert row(text, "total")[-1] == "differs: dog 1, cat 1"


def test_many_classes_are_cut_short() -> None:
    classes = tuple(f"k{number}" for number in range(30))
    text = printed(
        check_table(Check("x", classes, (DomainCheck("a", (1,) * 30, None, (30, 0, 30)),), (), (), ""))
    )
    assert "k9 1, and 20 more" in text
    assert "k10" not in text


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    domain = DomainCheck("[red]a", (1, 1), None, (2, 0, 2))
    text = printed(check_table(Check("[/]pets[b]", ("[i]cat", "[/x]"), (domain,), (), (), "")))
    assert "[/]pets[b]: 2 images" in text
    assert "[red]a" in text
    assert "[i]cat 1, [/x] 1" in text
    found = Status(DATASETS["pacs"], "found", "/data/[red]x[/]", found=dict(DATASETS["pacs"].counts))
    assert "/data/[red]x[/]" in printed(status_table([found]))


def test_the_documentation_has_the_catalog_as_it_is() -> None:
    table = catalog_markdown(ENTRIES)
    lines = table.splitlines()
    assert len(lines) == 2 + len(ENTRIES)
    assert len({line.count("|") for line in lines}) == 1
    for entry, line in zip(ENTRIES, lines[2:], strict=True):
        assert line.startswith(f"| `{entry.name}` | {entry.images:,} | {len(entry.classes)} |")
    page = Path(__file__).parents[2] / "docs" / "data.md"
    assert table in page.read_text(encoding="utf-8")
