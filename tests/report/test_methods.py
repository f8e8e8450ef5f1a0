from pathlib import Path

import pytest

from vicinal.adapters.methods import METHODS
from vicinal.report.methods import index_page, method_page

DOCS = Path(__file__).parents[2] / "docs" / "methods"


def test_the_index_is_up_to_date() -> None:
    assert (DOCS / "README.md").read_text(encoding="utf-8") == index_page(), "run `make docs`"


@pytest.mark.parametrize("name", list(METHODS))
def test_each_page_is_up_to_date(name: str) -> None:
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == method_page(name), "run `make docs`"


def test_no_page_is_left_of_a_method_that_is_gone() -> None:
    assert {path.stem for path in DOCS.glob("*.md")} - {"README"} == set(METHODS)


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_says_what_a_reader_wants_to_know(name: str) -> None:
    traits = METHODS[name].traits
    assert all((traits.paper, traits.updates, traits.batch_of_one, traits.passes))
    assert len(METHODS[name].build.__doc__ or "") > 80
