"""No test touches the user's home: decoded images and data sets live in temporary folders.

Kernels are tested where there is no GPU as well: their text is C++ too.
"""

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

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


@pytest.fixture(scope="session")
def build_cpp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """Return a function that compiles C++: a kernel's text, with what stands in for a GPU around it."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

    def build(text: str) -> ctypes.CDLL:
        if compiler is None:
            pytest.skip("no C++ compiler")
        folder: Path = tmp_path_factory.mktemp("kernels")
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        source.write_text(text)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-pthread", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))

    return build


@pytest.fixture(scope="session")
def as_pointers() -> Callable[[Sequence[Any]], Any]:
    """Return a function that makes what a kernel is told, tensors and whole numbers, an array of pointers."""

    def pointers(told: Sequence[Any]) -> Any:
        held = [
            ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else ctypes.c_int(value)
            for value in told
        ]
        array = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        array.held = held  # for as long as the array is
        return array

    return pointers
