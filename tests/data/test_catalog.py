import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vicinal.data.catalog import DATASETS
from vicinal.data.domains import assign_roles
from vicinal.data.entries import Arrays, BuiltIn, Tree
from vicinal.data.layouts import plain
from vicinal.data.load import load_dataset
from vicinal.errors import ConfigError, DataError

MakeTree = Callable[..., Path]
# As the authors of each set, or DomainBed's maintainers, state them; None where none are stated.
TOTALS = {
    "pacs": (9991, 7, 4),
    "vlcs": (10729, 5, 4),
    "office_home": (15588, 65, 4),
    "terra_incognita": (24788, 10, 4),
    "domainnet": (586575, 345, 6),
    "mini_domainnet": (140006, 126, 4),
    "rotated_mnist": (7 * 12400, 10, 7),
    "rotated_fashion": (7 * 22000, 10, 7),
    "cifar10_c": (60000 + 15 * 10000, 10, 16),
    "digits": (7 * 1797, 10, 7),
}
OFFICIAL_PACS = {
    "art_painting": (379, 255, 285, 184, 201, 295, 449),
    "cartoon": (389, 457, 346, 135, 324, 288, 405),
    "photo": (189, 202, 182, 186, 199, 280, 432),
    "sketch": (772, 740, 753, 608, 816, 80, 160),
}


def test_the_nine_benchmarks_and_the_demo_are_there() -> None:
    assert set(DATASETS) == set(TOTALS)


@pytest.mark.parametrize("name", list(DATASETS))
def test_counts_classes_and_domains_are_the_published_ones(name: str) -> None:
    entry = DATASETS[name]
    assert (entry.images, len(entry.classes), len(entry.domains)) == TOTALS[name]
    assert len(set(entry.classes)) == len(entry.classes)
    assert set(entry.counts) == set(entry.domains)
    assert min(entry.counts.values()) > 0


@pytest.mark.parametrize("name", list(DATASETS))
def test_an_entry_says_all_that_a_user_must_know(name: str) -> None:
    entry = DATASETS[name]
    assert entry.name == name
    for text in (entry.title, entry.licence, entry.home):
        assert text
        assert "\n" not in text
    sources = len(entry.domains) - len(entry.default_targets)
    assert sources >= entry.min_sources
    assert entry.channels in (1, 3)


@pytest.mark.parametrize("name", list(DATASETS))
def test_spellings_are_told_apart(name: str) -> None:
    entry = DATASETS[name]
    for kind, folders in ((entry.classes, "class_folders"), (entry.domains, "domain_folders")):
        known = getattr(entry.source, folders, {})
        assert set(known) <= set(kind)
        owners: dict[str, set[str]] = {}
        for own in kind:
            for folder in (own, *known.get(own, ())):
                owners.setdefault(plain(folder), set()).add(own)
        assert [folder for folder, of in owners.items() if len(of) > 1] == []


@pytest.mark.parametrize("name", [n for n in DATASETS if isinstance(DATASETS[n].source, Tree)])
def test_layouts_and_lists_have_the_fields_they_need(name: str) -> None:
    source = DATASETS[name].source
    assert isinstance(source, Tree)
    assert len({layout.name for layout in source.layouts}) == len(source.layouts)
    for layout in source.layouts:
        fields = [field for _, field, _, _ in string.Formatter().parse(layout.template) if field]
        assert sorted(fields) == ["domain", "file", "label"]
        assert layout.template.endswith("/{file}")
    lists = source.split.lists
    if lists is not None:
        fields = [field for _, field, _, _ in string.Formatter().parse(lists.file) if field]
        assert sorted(fields) == ["domain", "part"]
        assert lists.folders


@pytest.mark.parametrize("name", list(DATASETS))
def test_downloads_have_addresses_and_names_of_their_own(name: str) -> None:
    entry = DATASETS[name]
    assert isinstance(entry.source, BuiltIn) or entry.downloads
    places = [(download.folder, download.file) for download in entry.downloads]
    assert len(set(places)) == len(places)
    assert all(download.urls for download in entry.downloads)


def test_pacs_per_class_counts_are_those_of_the_official_lists() -> None:
    entry = DATASETS["pacs"]
    assert entry.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    assert dict(entry.class_counts) == OFFICIAL_PACS
    assert sum(map(sum, OFFICIAL_PACS.values())) == 9991


def test_class_orders_are_those_of_the_lists() -> None:
    office, full, mini = (DATASETS[name].classes for name in ("office_home", "domainnet", "mini_domainnet"))
    assert list(office) == sorted(office)  # by bytes: TV before Table
    assert full.index("t-shirt") == 327
    assert (full[0], full[-1]) == ("aircraft_carrier", "zigzag")
    assert set(mini) <= set(full)
    assert list(mini) == sorted(mini, key=full.index)


def test_the_rotated_sets_have_the_papers_angles_and_counts() -> None:
    for name, train in (("rotated_mnist", 2000), ("rotated_fashion", 10000)):
        entry = DATASETS[name]
        assert entry.domains == ("0", "15", "30", "45", "60", "75", "90")
        assert entry.default_targets == ("0", "90")
        assert entry.options.train == train
        assert entry.options.test is None
        assert isinstance(entry.source, Arrays)


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": {"a": 3}},
        {"default_targets": ("c",)},
        {"class_counts": {"a": (1, 1)}},
        {"class_counts": {"a": (3,)}},
    ],
)
def test_a_slip_in_the_tables_shows_at_import(changes: dict[str, object]) -> None:
    good = replace(
        DATASETS["digits"],
        classes=("x", "y"),
        domains=("a", "b"),
        default_targets=("a",),
        counts={"a": 3, "b": 2},
        class_counts={"a": (1, 2)},
    )
    with pytest.raises(DataError, match="catalog entry 'digits'"):
        replace(good, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [n for n in DATASETS if isinstance(DATASETS[n].source, BuiltIn)])
def test_an_entry_says_what_its_loader_gives(name: str) -> None:
    entry = DATASETS[name]
    data = load_dataset(name)
    assert entry.name == data.name == name
    assert entry.classes == data.classes
    assert entry.domains == tuple(data.domains)
    for domain in data.domains.values():
        assert domain.images.shape[1:] == (entry.channels, entry.size, entry.size)
        assert len(domain.images) == entry.counts[domain.name]
    roles = assign_roles(data, entry.default_targets)
    assert tuple(target.name for target in roles.targets) == entry.default_targets


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
    with pytest.raises(DataError) as caught:
        load_dataset(name)
    said = str(caught.value)
    assert said.startswith(f"unknown dataset '{name}': choose from cifar10_c, digits, domainnet, ")
    assert said.endswith("or the path of a folder of domain folders or of a CSV with path, label and domain")


def test_a_file_is_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "data.zip").touch()
    with pytest.raises(DataError, match=r"data\.zip' has no column path, label, domain: its first line"):
        load_dataset(str(tmp_path / "data.zip"))
