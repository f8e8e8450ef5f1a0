"""The index of docs/experiments.md lists every section, and every section that is named exists."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "experiments.md").read_text(encoding="utf-8")
HEADS = re.findall(r"^## (\d+)\. (.+)$", PAGE, re.MULTILINE)


def anchor(heading: str) -> str:
    """Return what a heading is linked by on the usual renderers of Markdown."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_sections_are_numbered_in_order() -> None:
    assert [int(number) for number, _ in HEADS] == list(range(1, len(HEADS) + 1))


def test_the_index_lists_every_section_and_what_became_of_it() -> None:
    rows = re.findall(r"^\| (\d+) \| \[(.+?)\]\(#(.+?)\) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert [(number, title) for number, title, *_ in rows] == HEADS
    assert [link for _, _, link, *_ in rows] == [anchor(f"{number}. {title}") for number, title in HEADS]
    assert all(became and line for *_, became, line in rows)


def test_sections_that_are_named_exist() -> None:
    pairs = re.findall(r"\bsections? (\d+)(?: (?:and|to|or) (\d+))?", PAGE)
    named = {int(number) for pair in pairs for number in pair if number}
    assert named
    assert max(named) <= len(HEADS)
