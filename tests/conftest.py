"""No test touches the user's home: decoded images and data sets live in temporary folders."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

NUMBERS = itertools.count()


def redirect(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Point everything that vicinal finds or keeps outside a run into a folder, which need not exist."""
    patch.setenv("VICINAL_CACHE", str(folder / "cache"))
    patch.setenv("VICINAL_DATA", str(folder / "data"))


@pytest.fixture(scope="session", autouse=True)
def shared_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give fixtures that outlive a test places of their own: they are set up before those of the test."""
    with pytest.MonkeyPatch.context() as patch:
        redirect(patch, tmp_path_factory.mktemp("places"))
        yield


@pytest.fixture(autouse=True)
def own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test places of its own, outside its tmp_path, which tests look through."""
    redirect(monkeypatch, tmp_path_factory.getbasetemp() / f"places-of-test-{next(NUMBERS)}")
