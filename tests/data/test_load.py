from pathlib import Path
from typing import Any

import pytest

from vicinal.data.catalog import DATASETS
from vicinal.data.entries import DatasetEntry, Tree
from vicinal.data.layouts import Layout

Trees = Any  # of conftest.py

TREES = [name for name in DATASETS if isinstance(DATASETS[name].source, Tree)]
LAYOUTS = [(name, layout) for name in TREES for layout in DATASETS[name].source.layouts]
BY_LAYOUT = pytest.mark.parametrize(
    ("name", "layout"), LAYOUTS, ids=[f"{name}-{layout.name}" for name, layout in LAYOUTS]
)


def prepare_lists(trees: Trees, entry: DatasetEntry, folder: Path) -> None:
    """Write the lists without which a data set is not one; their test part validates."""
    lists = entry.source.split.lists
    if lists is not None and lists.only and lists.needed:
        trees.lists(folder / lists.folders[0], entry, {"train": [10, 11], "test": [2]})


@BY_LAYOUT
@pytest.mark.parametrize("kind", ["x.tar", "dotted.tar", "stored.zip", "deflated.zip"])
def test_every_layout_from_folder_and_archive_is_the_same(
    trees: Trees, tmp_path: Path, name: str, layout: Layout, kind: str
) -> None:
    entry = DATASETS[name]
    files = trees.files(entry, layout.template)
    loaded = []
    for form in ("folder", "archive"):
        root = tmp_path / form / entry.source.folders[0]
        if form == "folder":
            trees.write(root, files)
        else:
            trees.archive(root / f"anything{kind[-4:]}", files, kind)
        prepare_lists(trees, entry, root)
        loaded.append(trees.load(name, root.parent))
    trees.check(loaded[0], entry)
    assert loaded[0].facts["layout"] == layout.name
    trees.same(*loaded)
