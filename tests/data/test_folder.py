import os
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vicinal.data.domains import DomainSet, assign_roles
from vicinal.data.folder import scan_folder
from vicinal.data.load import load_dataset
from vicinal.errors import ConfigError, DataError

MakeTree = Callable[..., Path]


def load_folder(root: Path, size: int, channels: int, **options: Any) -> DomainSet:
    return load_dataset(str(root), size, channels, **options)


def test_a_folder_becomes_domains(make_tree: MakeTree) -> None:
    data = load_folder(make_tree(("b", "a")), 8, 1)
    assert data.name == "pets"
    assert data.classes == ("cat", "dog")
    assert tuple(data.domains) == ("a", "b")
    assert data.bad == ()
    first = data.domains["b"]
    assert first.images.shape == (6, 1, 8, 8)
    # "b" was written first, so its gray levels are 0 to 5.
    assert first.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert data.domains["a"].images[:, 0, 0, 0].tolist() == [6, 7, 8, 9, 10, 11]
    assert first.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert first.paths[4] == "b/dog/1.png"
    assert first.test.tolist() == [0, 1, 2, 3, 4, 5]
    assert sorted([*first.train.tolist(), *first.val.tolist()]) == [0, 1, 2, 3, 4, 5]
    assert first.labels[first.val].tolist() == [0, 1]


def test_domains_classes_and_files_are_in_natural_order(make_tree: MakeTree) -> None:
    root = make_tree(("10", "9", "100"), ("b2", "A1", "b10"), count=11)
    data = load_folder(root, 4, 1)
    assert tuple(data.domains) == ("9", "10", "100")
    assert data.classes == ("A1", "b2", "b10")
    assert data.domains["9"].paths[9:12] == ("9/A1/9.png", "9/A1/10.png", "9/b2/0.png")


def test_loading_twice_gives_the_same_and_the_seed_moves_the_split(make_tree: MakeTree) -> None:
    root = make_tree(count=10)
    one, same, other = (load_folder(root, 4, 3, seed=seed).domains["a"] for seed in (0, 0, 1))
    assert torch.equal(one.images, same.images)
    assert torch.equal(one.val, same.val)
    assert one.paths == same.paths
    assert not torch.equal(one.val, other.val)


def test_sources_and_targets_come_out_of_a_folder(make_tree: MakeTree) -> None:
    roles = assign_roles(load_folder(make_tree(("a", "b", "c")), 4, 3), ["b"])
    assert [source.name for source in roles.sources] == ["a", "c"]
    assert len(roles.targets[0].images) == 6


def test_hidden_and_other_files_are_ignored(make_tree: MakeTree) -> None:
    root = make_tree()
    for name in ("README.txt", ".DS_Store", "a/labels.csv", "a/cat/.0.png", "a/cat/notes.md", "loose.png"):
        (root / name).write_text("x")
    for name in (".git/cat", "__MACOSX/cat", "a/.thumbs"):
        (root / name).mkdir(parents=True)
    data = load_folder(root, 4, 1)
    assert tuple(data.domains) == ("a", "b")
    assert len(data.domains["a"].images) == 6


def test_a_class_with_one_image_is_trained_on(make_tree: MakeTree) -> None:
    root = make_tree()
    for name in ("1.png", "2.png"):
        (root / "a" / "cat" / name).unlink()
    domain = load_folder(root, 4, 1).domains["a"]
    assert domain.labels.tolist() == [0, 1, 1, 1]
    assert 0 in domain.train.tolist()
    assert domain.labels[domain.val].tolist() == [1]


def test_one_image_in_every_class_leaves_nothing_to_validate(make_tree: MakeTree) -> None:
    roles = assign_roles(load_folder(make_tree(("a", "b", "c"), count=1), 4, 1), ["a"])
    assert len(roles.sources[0].train) == 2
    assert len(roles.sources[0].val) == 0


def test_images_below_a_class_folder_belong_to_the_class(make_tree: MakeTree) -> None:
    root = make_tree()
    (root / "a" / "cat" / "more").mkdir()
    shutil.copy(root / "a" / "cat" / "0.png", root / "a" / "cat" / "more" / "0.png")
    assert load_folder(root, 4, 1).domains["a"].labels.bincount().tolist() == [4, 3]


@pytest.mark.parametrize("problem", ["missing", "file", "empty", "loose images"])
def test_a_root_without_domains(tmp_path: Path, problem: str) -> None:
    root = tmp_path / "root"
    if problem == "file":
        root.touch()
    elif problem != "missing":
        root.mkdir()
    if problem == "loose images":
        (root / "a.png").touch()
    said = {
        "missing": "unknown dataset '.*root': choose from .*, or the path of a folder of domain folders",
        "file": "has no column path, label, domain",  # a file is read as a table
    }.get(problem, r"holds no domain folders.*<domain>/<class>/<image>, with two domains or more")
    with pytest.raises(DataError, match=said) as caught:
        load_folder(root, 4, 1)
    assert "\n" not in str(caught.value)


def test_one_domain_only(make_tree: MakeTree) -> None:
    with pytest.raises(DataError, match=r"only the domain 'a'.*two domains or more"):
        load_folder(make_tree(("a",)), 4, 1)


def test_a_domain_without_class_folders(make_tree: MakeTree) -> None:
    root = make_tree()
    (root / "c").mkdir()
    (root / "c" / "0.png").touch()
    with pytest.raises(DataError, match=r"/c' holds no class folders.*<domain>/<class>/<image>"):
        load_folder(root, 4, 1)


def test_a_class_folder_without_images(make_tree: MakeTree) -> None:
    root = make_tree()
    for path in (root / "b" / "dog").iterdir():
        path.rename(path.with_suffix(".txt"))
    with pytest.raises(DataError, match="b/dog' holds no images"):
        load_folder(root, 4, 1)


def test_a_class_without_images_in_any_domain_may_be_no_class(make_tree: MakeTree) -> None:
    root = make_tree()
    for domain in ("a", "b"):
        for path in (root / domain / "dog").iterdir():
            path.unlink()
    said = r"class 'dog' has no images in any domain, as in '.*/a/dog'.*or remove the folder 'dog'"
    with pytest.raises(DataError, match=said):
        load_folder(root, 4, 1)
    for domain in ("a", "b"):
        (root / domain / "dog").rmdir()
    assert load_folder(root, 4, 1).classes == ("cat",)


def test_classes_that_differ_are_named_with_their_domains(make_tree: MakeTree) -> None:
    root = make_tree(("a", "b", "c"))
    (root / "b" / "dog").rename(root / "b" / "dgo")
    with pytest.raises(DataError) as caught:
        load_folder(root, 4, 1)
    assert "'dog' is missing from b" in str(caught.value)
    assert "'dgo' is only in b" in str(caught.value)
    assert "'cat'" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_many_differences_are_cut_short(make_tree: MakeTree) -> None:
    root = make_tree(("a", "b", "c"), tuple(f"k{position}" for position in range(12)), count=1)
    shutil.rmtree(root / "b")
    (root / "b" / "other").mkdir(parents=True)
    with pytest.raises(DataError, match="'k4' is missing from b; and 8 more"):
        load_folder(root, 4, 1)


def test_a_bad_image_is_named_or_skipped(make_tree: MakeTree) -> None:
    root = make_tree()
    (root / "a" / "dog" / "1.png").write_text("x")
    with pytest.raises(DataError, match=r"a/dog/1\.png: not an image.*--skip-bad"):
        load_folder(root, 4, 1)
    data = load_folder(root, 4, 1, skip_bad=True)
    assert len(data.bad) == 1
    assert "a/dog/1.png: not an image" in data.bad[0]
    kept, after = data.domains["a"], data.domains["b"]
    assert sorted([*kept.train.tolist(), *kept.val.tolist()]) == kept.test.tolist() == [0, 1, 2, 3, 4]
    assert kept.paths == ("a/cat/0.png", "a/cat/1.png", "a/cat/2.png", "a/dog/0.png", "a/dog/2.png")
    assert kept.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 5]
    assert kept.labels.tolist() == [0, 0, 0, 1, 1]
    assert after.images[:, 0, 0, 0].tolist() == [6, 7, 8, 9, 10, 11]


def test_a_class_whose_images_are_all_bad(make_tree: MakeTree) -> None:
    root = make_tree()
    for path in (root / "b" / "cat").iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="class 'cat' of domain 'b' has no readable image"):
        load_folder(root, 4, 1, skip_bad=True)


def test_progress_counts_over_all_domains(make_tree: MakeTree) -> None:
    seen: list[tuple[int, int]] = []
    load_folder(make_tree(), 4, 1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 12) for done in range(1, 13)]


def test_unicode_names_agree_however_they_are_composed(make_tree: MakeTree) -> None:
    root = make_tree(("光", "ombre"), ("café", "日本"))
    decomposed = root / "ombre" / unicodedata.normalize("NFD", "café")
    (root / "ombre" / "café").rename(decomposed)
    data = load_folder(root, 4, 1)
    assert data.classes == ("café", "日本")
    assert set(data.domains) == {"光", "ombre"}
    assert data.domains["ombre"].labels.bincount().tolist() == [3, 3]


def test_two_spellings_of_one_class_in_one_domain_are_refused(make_tree: MakeTree) -> None:
    root = make_tree(classes=("café", "thé"))
    other = root / "a" / unicodedata.normalize("NFD", "café")
    other.mkdir(exist_ok=True)
    if len(list((root / "a").iterdir())) == 2:
        pytest.skip("this file system sees one name in both spellings")
    with pytest.raises(DataError, match="two folders that both read 'café'"):
        load_folder(root, 4, 1)


def test_linked_domains_classes_and_images(make_tree: MakeTree, tmp_path: Path) -> None:
    root = make_tree(("a", "b"))
    store = tmp_path / "store"
    shutil.move(root / "b", store)
    (root / "b").symlink_to(store)
    (root / "a" / "cat" / "link.png").symlink_to(store / "cat" / "0.png")
    data = load_folder(root, 4, 1)
    assert len(data.domains["b"].images) == 6
    assert data.domains["b"].paths[0] == "b/cat/0.png"
    assert data.domains["a"].images[3, 0, 0, 0] == data.domains["b"].images[0, 0, 0, 0]


def test_the_name_is_the_folders_even_from_inside_it(
    make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_tree())
    data = load_folder(Path(), 4, 1)
    assert data.name == "pets"
    assert data.domains["a"].paths[0] == "a/cat/0.png"


def test_mixed_kinds_of_image_share_one_shape(make_tree: MakeTree) -> None:
    root = make_tree()
    Image.fromarray(np.full((9, 20, 4), 128, np.uint8)).save(root / "a" / "cat" / "x.png")
    Image.new("CMYK", (7, 3)).save(root / "a" / "cat" / "y.jpg")
    assert load_folder(root, 12, 3).domains["a"].images.shape == (8, 3, 12, 12)


def test_a_validation_fraction_out_of_range(make_tree: MakeTree) -> None:
    with pytest.raises(ConfigError, match="validation fraction"):
        load_folder(make_tree(), 4, 1, val_fraction=1.5)


def test_scanning_says_what_a_root_is_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, said in (("gone", "does not exist"), ("file", "is not a folder")):
        with pytest.raises(DataError, match=f"/{name}' {said}: give a folder of domain folders"):
            scan_folder(tmp_path / name)


def test_a_folder_too_many_is_one_domain_without_images(make_tree: MakeTree, tmp_path: Path) -> None:
    make_tree()
    with pytest.raises(DataError, match=r"only the domain 'pets': arrange the images as <domain>/<class>/"):
        load_folder(tmp_path, 4, 1)


def test_an_extra_empty_folder_beside_the_domains_is_named(make_tree: MakeTree) -> None:
    root = make_tree()
    (root / "results").mkdir()
    with pytest.raises(DataError, match="/results' holds no class folders"):
        load_folder(root, 4, 1)


def test_an_empty_image_and_a_dangling_link_are_bad_images(make_tree: MakeTree) -> None:
    root = make_tree()
    (root / "a" / "cat" / "0.png").write_bytes(b"")
    (root / "b" / "dog" / "gone.png").symlink_to(root / "nowhere.png")
    with pytest.raises(DataError, match=r"a/cat/0\.png: the file is empty.*--skip-bad"):
        load_folder(root, 4, 1)
    data = load_folder(root, 4, 1, skip_bad=True)
    assert ["0.png: the file is empty" in line for line in data.bad] == [True, False]
    assert "b/dog/gone.png: cannot be decoded" in data.bad[1]
    assert [len(domain.images) for domain in data.domains.values()] == [5, 6]


def test_a_folder_linked_to_its_own_ancestor_is_entered_once(make_tree: MakeTree) -> None:
    root = make_tree()
    (root / "a" / "cat" / "loop").symlink_to(root / "a")
    # loop/dog is below a/cat, once; loop/cat would be the way back.
    domain = load_folder(root, 4, 1).domains["a"]
    assert domain.labels.bincount().tolist() == [6, 3]
    assert len(set(domain.paths)) == 9


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX only")
def test_a_name_that_is_not_utf8_is_loaded_and_its_split_stored(make_tree: MakeTree) -> None:
    root = make_tree(count=4)
    odd = os.fsencode(root / "a" / "cat") + b"/caf\xe9.png"
    try:
        shutil.copy(root / "a" / "cat" / "0.png", odd)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    one, again = (load_folder(root, 4, 1).domains["a"] for _ in range(2))
    assert "a/cat/caf\ufffd.png" in one.paths
    assert one.val.tolist() == again.val.tolist()
    assert len(list((root / ".vicinal").iterdir())) == 1


def test_the_facts_say_folder_and_stored_split(make_tree: MakeTree) -> None:
    facts = load_folder(make_tree(), 4, 1, val_fraction=0.5).facts
    assert facts == {
        "layout": "folder",
        "split": "stored, 0.5 of every class for validation",
        "size": 4,
        "fit": "crop",
    }
