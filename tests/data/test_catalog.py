from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vicinal.data.catalog import DATASETS, load_dataset
from vicinal.data.domains import assign_roles
from vicinal.errors import ConfigError, DataError

MakeTree = Callable[..., Path]


@pytest.mark.parametrize("name", list(DATASETS))
def test_an_entry_says_what_its_loader_gives(name: str) -> None:
    entry = DATASETS[name]
    data = load_dataset(name)
    assert entry.name == data.name == name
    assert entry.classes == data.classes
    assert entry.domains == tuple(data.domains)
    for domain in data.domains.values():
        assert domain.images.shape[1:] == (entry.channels, entry.size, entry.size)
    roles = assign_roles(data, entry.default_targets)
    assert tuple(target.name for target in roles.targets) == entry.default_targets
    assert entry.title
    assert entry.licence


def test_the_digits_entry() -> None:
    entry = DATASETS["digits"]
    assert entry.default_targets == ("0", "90")
    assert (entry.size, entry.channels) == (16, 1)
    assert "BSD" in entry.licence
    assert "CC BY 4.0" in entry.licence


def test_size_channels_and_seed_reach_the_digits() -> None:
    gray, colour = (load_dataset("digits", 12, channels, seed=3).domains["15"] for channels in (1, 3))
    assert colour.images.shape == (1797, 3, 12, 12)
    assert torch.equal(colour.images, gray.images.expand(-1, 3, -1, -1))
    assert torch.equal(colour.test, gray.test)
    assert not torch.equal(gray.test, load_dataset("digits", 12).domains["15"].test)


@pytest.mark.parametrize(("size", "channels"), [(0, 1), (16, 0), (16, 2)])
def test_impossible_shapes_are_refused(size: int, channels: int) -> None:
    with pytest.raises(ConfigError, match="1 or 3 channels"):
        load_dataset("digits", size, channels)


def test_a_folder_loads_by_its_path(make_tree: MakeTree) -> None:
    root = make_tree()
    data = load_dataset(str(root), 6, 1, val_fraction=0.5, seed=1)
    assert data.name == "pets"
    assert data.domains["a"].images.shape == (6, 1, 6, 6)
    assert len(data.domains["a"].val) == 4
    assert load_dataset(str(root)).domains["a"].images.shape == (6, 3, 224, 224)


def test_skip_bad_and_progress_reach_the_folder(make_tree: MakeTree) -> None:
    root = make_tree()
    (root / "a" / "cat" / "0.png").write_bytes(b"")
    seen: list[int] = []
    data = load_dataset(str(root), 4, 1, skip_bad=True, progress=lambda done, total: seen.append(done))
    assert len(data.bad) == 1
    assert seen[-1] == 12


def test_a_name_wins_over_a_folder_called_the_same(
    make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_tree()
    root.rename(root.parent / "digits")
    monkeypatch.chdir(root.parent)
    assert load_dataset("digits").classes == tuple("0123456789")
    assert load_dataset("./digits", 4, 1).classes == ("cat", "dog")


@pytest.mark.parametrize("name", ["digitz", "", "no/such/folder"])
def test_neither_a_name_nor_a_folder(name: str) -> None:
    with pytest.raises(DataError, match="choose from digits, or the path of a folder of domain folders"):
        load_dataset(name)


def test_a_file_is_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "data.zip").touch()
    with pytest.raises(DataError, match="is not a folder"):
        load_dataset(str(tmp_path / "data.zip"))
