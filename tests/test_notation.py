"""docs/notation.md and the code agree: names exist where the page says, equations are numbered as it says."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vicinal"
PAGE = (ROOT / "docs" / "notation.md").read_text(encoding="utf-8")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# "Eq. (8)", "Eq. (8) and Eq. (11)", "Eqs. (8), (11)": each number in its own brackets after one of these.
MENTION = re.compile(r"\bEqs?\.?\s*\((\d+)\)((?:\s*(?:,|and|or)\s*\(\d+\))*)")
LOOSE = re.compile(r"\b[Ee]q(?:s|uations?)?\b\.?\s*~?\(?\d")


class Row(NamedTuple):
    name: str
    equations: frozenset[int]
    file: str


def table_lines(page: str, columns: int) -> Iterator[list[str]]:
    """Yield the cells of every body line of the tables with that many columns."""
    body = False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if body and len(cells) == columns:
            yield cells
        body = len(cells) == columns and (body or set("".join(cells)) == {"-"})


def numbers(text: str) -> frozenset[int]:
    return frozenset(int(number) for number in re.findall(r"\((\d+)\)", text))


def rows(page: str) -> list[Row]:
    return [
        Row(name.strip("`"), numbers(equations), file.strip("`"))
        for _, _, name, equations, file in table_lines(page, columns=5)
    ]


def mentions(docstring: str) -> frozenset[int]:
    return frozenset(number for match in MENTION.finditer(docstring) for number in numbers(match.group(0)))


def definitions(tree: ast.Module) -> dict[str, Definition]:
    """Return functions and classes by name, those inside a class as Class.name."""
    found: dict[str, Definition] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Definition):
                found[prefix + child.name] = child
                visit(child, f"{prefix}{child.name}.")

    visit(tree, "")
    return found


def identifiers(tree: ast.Module) -> set[str]:
    """Return every name a file defines or binds: definitions, arguments, variables, fields."""
    found = set(definitions(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def parse(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


ROWS = rows(PAGE)
EQUATIONS = frozenset(number for cells in table_lines(PAGE, columns=2) for number in numbers(cells[0]))
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
TABLE = {(row.file, row.name): row.equations for row in ROWS}


def test_the_page_is_read_whole() -> None:
    assert sorted(EQUATIONS) == list(range(1, 13))
    assert len(ROWS) == PAGE.count(".py` |\n"), "a row is not of the form this test reads"
    assert len(TABLE) == len(ROWS), "two rows have the same name and file"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.file}:{row.name}")
def test_every_code_name_is_in_its_file(row: Row) -> None:
    assert (PACKAGE / row.file).is_file(), f"no file {row.file}"
    assert row.name in identifiers(parse(row.file)), f"{row.file} binds no name '{row.name}'"
    assert row.equations <= EQUATIONS


@pytest.mark.parametrize("file", FILES)
def test_equations_in_docstrings_are_those_of_the_table(file: str) -> None:
    tree = parse(file)
    for name, node in definitions(tree).items():
        told = mentions(ast.get_docstring(node) or "")
        if told:
            assert (file, name) in TABLE, (
                f"{name} cites Eq. {sorted(told)} but has no row in docs/notation.md"
            )
            known = TABLE[file, name]
            assert told == known, f"{name} cites Eq. {sorted(told)}, docs/notation.md has {sorted(known)}"
    of_file = frozenset().union(*(known for (where, _), known in TABLE.items() if where == file))
    told = mentions(ast.get_docstring(tree) or "")
    assert told <= of_file, f"{file} cites Eq. {sorted(told)}, its rows in docs/notation.md {sorted(of_file)}"


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("functional/")])
def test_the_maths_has_a_row_for_every_name_and_cites_what_the_row_says(file: str) -> None:
    tree = parse(file)
    public = {node.name: node for node in tree.body if isinstance(node, Definition) and node.name[0] != "_"}
    for name, node in public.items():
        assert (file, name) in TABLE, f"{file}: {name} has no row in docs/notation.md"
        told = mentions(ast.get_docstring(node) or "")
        assert told == TABLE[file, name], (
            f"{name} cites {sorted(told)}, the table has {sorted(TABLE[file, name])}"
        )


@pytest.mark.parametrize("file", FILES)
def test_equations_are_cited_in_the_one_form_this_test_reads(file: str) -> None:
    text = (PACKAGE / file).read_text(encoding="utf-8")
    assert numbers(" ".join(match.group(0) for match in MENTION.finditer(text))) <= EQUATIONS
    unread = [found.group(0) for found in LOOSE.finditer(MENTION.sub("", text))]
    assert not unread, f"{file} cites an equation as {unread}: write Eq. (n)"


def test_the_test_itself_reads_mentions_and_rows() -> None:
    assert mentions("the loss of Eq. (8) and Eq. (11).") == {8, 11}
    assert mentions("Eqs. (5), (6) and (10); shape (12)") == {5, 6, 10}
    assert mentions("a bracket (3) alone, Algorithm 1") == frozenset()
    assert LOOSE.search("see eq. 3")
    assert LOOSE.search("equation (3)")
    assert not LOOSE.search("equal to 3")
    page = "| s | m | n | e | f |\n|---|---|---|---|---|\n| w | what | `mix` | (1), (2) | `a/b.py` |\n"
    assert rows(page) == [Row("mix", frozenset({1, 2}), "a/b.py")]
    tree = ast.parse("class A:\n    field: int\n    def f(self, x):\n        y = 1\n        return z")
    assert identifiers(tree) == {"A", "A.f", "self", "x", "y", "field"}
