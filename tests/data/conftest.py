from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

MakeTree = Callable[..., Path]


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """Return a function that writes root/<domain>/<class>/<i>.png."""
    # Each image has one gray level of its own.

    def make(
        domains: Sequence[str] = ("a", "b"), classes: Sequence[str] = ("cat", "dog"), count: int = 3
    ) -> Path:
        root = tmp_path / "pets"
        level = 0
        for domain in domains:
            for label in classes:
                folder = root / domain / label
                folder.mkdir(parents=True)
                for position in range(count):
                    Image.fromarray(np.full((8, 8), level, dtype=np.uint8)).save(folder / f"{position}.png")
                    level += 1
        return root

    return make
