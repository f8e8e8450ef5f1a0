"""Pickles from strangers: numpy arrays in plain containers are read, nothing that a file names is run."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from vicinal.data.files import printable
from vicinal.errors import DataError


def load_plain_pickle(path: Path) -> Any:
    """Return what a pickle holds: numpy arrays, numbers and text, in lists, tuples and dicts.

    Also of Python 2, whose text comes back as text. A pickle that names anything else is refused.
    """
    try:
        with path.open("rb") as file:
            return _PlainUnpickler(file, encoding="latin1").load()
    # A damaged pickle can raise almost anything.
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{printable(path)}: cannot be read as a pickle ({why}); get it anew") from error


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of numpy arrays in plain containers, which calls nothing else that a file may name."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.zeros(0).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            # How Python 3 writes bytes for Python 2.
            return _as_latin1
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _as_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it names the encoding {encoding}")
    return text.encode("latin1")
