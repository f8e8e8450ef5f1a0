"""Every data set of images in folders, in every layout it accepts, through `load_dataset`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vicinal.data.catalog import DATASETS
from vicinal.data.entries import DatasetEntry, Tree
from vicinal.data.find import find_tree
from vicinal.data.layouts import Layout
from vicinal.data.load import load_dataset
from vicinal.errors import VicinalError

Trees = Any  # of conftest.py

TREES = [name for name in DATASETS if isinstance(DATASETS[name].source, Tree)]
SMALL = ["pacs", "vlcs", "terra_incognita"]
LAYOUTS = [(name, layout) for name in TREES for layout in DATASETS[name].source.layouts]
EACH_LAYOUT = pytest.mark.parametrize(
    ("name", "layout"), LAYOUTS, ids=[f"{name}-{layout.name}" for name, layout in LAYOUTS]
)
IN_DATA_FOLDER = [(name, pattern) for name in TREES for pattern in DATASETS[name].source.archives]


def place_lists(trees: Trees, entry: DatasetEntry, folder: Path) -> None:
    """Write the lists without which a data set is not one; their test part validates."""
    lists = entry.source.split.lists
    if lists is not None and lists.only and lists.needed:
        trees.lists(folder / lists.folders[0], entry, {"train": [10, 11], "test": [2]})


def refused(name: str, data: Path, **options: Any) -> str:
    """Return the one line by which a data set is refused."""
    with pytest.raises(VicinalError) as caught:
        load_dataset(name, 1, 3, data_dir=data, cache=data.parent / "cache", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- Folders and archives -----------------------------------------------------------------------------------


@EACH_LAYOUT
def test_every_layout_from_folder_and_archive_is_the_same(
    trees: Trees, tmp_path: Path, name: str, layout: Layout
) -> None:
    entry = DATASETS[name]
    files = trees.files(entry, layout.template)
    folder = tmp_path / "folder" / entry.source.folders[0]
    trees.write(folder, files)
    place_lists(trees, entry, folder)
    data = trees.load(name, folder.parent)
    trees.check(data, entry)
    assert data.facts["layout"] == layout.name
    listed = trees.listed(name, folder.parent)
    for domain in data.domains.values():
        assert domain.paths == tuple(path for _, path, _, _ in listed[domain.name])
    for kind in trees.archives:
        root = tmp_path / kind / entry.source.folders[0]
        trees.archive(root / f"any name{kind[-4:]}", files, kind)
        place_lists(trees, entry, root)
        assert trees.listed(name, root.parent) == listed, kind
    if name in SMALL:
        trees.same(trees.load(name, root.parent), data)


@pytest.mark.parametrize(("name", "pattern"), IN_DATA_FOLDER)
def test_archives_in_the_data_folder_itself(trees: Trees, tmp_path: Path, name: str, pattern: str) -> None:
    entry = DATASETS[name]
    files = trees.files(entry, prefix="kfold/" if name == "pacs" else "")
    trees.write(tmp_path / "folder" / entry.source.folders[0], files)
    data = tmp_path / "data"
    kind = "deflated.zip" if pattern.endswith("zip") else "x.tar"
    if name == "pacs" and kind == "x.tar":
        for domain in entry.domains:
            part = {path: content for path, content in files.items() if f"/{domain}/" in path}
            trees.archive(data / pattern.replace("*", domain), part, kind)
    else:
        trees.archive(data / pattern.replace("*", "_10072016"), files, kind)
    (data / "unrelated.txt").write_text("x")
    trees.same(trees.load(name, data), trees.load(name, tmp_path / "folder"))
    trees.check(trees.load(name, data), entry)


@pytest.mark.parametrize("prefix", ["kfold/", "images/", "Copy of data/raw/images/"])
@pytest.mark.parametrize("name", SMALL)
def test_folders_too_many_are_seen_through(trees: Trees, tmp_path: Path, name: str, prefix: str) -> None:
    entry = DATASETS[name]
    trees.write(tmp_path / "data" / entry.source.folders[0], trees.files(entry, prefix=prefix))
    data = trees.load(name, tmp_path / "data")
    trees.check(data, entry)
    assert all(path.startswith(prefix) for domain in data.domains.values() for path in domain.paths)


@pytest.mark.parametrize("shouted", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"), [(name, folder) for name in TREES for folder in DATASETS[name].source.folders]
)
def test_the_folder_goes_by_each_of_its_names(
    trees: Trees, tmp_path: Path, name: str, folder: str, shouted: bool
) -> None:
    entry = DATASETS[name]
    root = tmp_path / (folder.upper().replace("_", "-") if shouted else folder)
    for d, domain in enumerate(entry.domains):
        trees.write(root, {f"{domain}/{entry.classes[d]}/1.png": trees.pixel()})
    found = find_tree(entry, [tmp_path])
    assert found is not None
    assert found.root == root
    placed = sorted((item.label, item.domain) for item in found.items)
    assert placed == list(enumerate(entry.domains))


@pytest.mark.parametrize("name", [*SMALL, "office_home"])
def test_the_data_folder_may_be_the_sets_own(trees: Trees, tmp_path: Path, name: str) -> None:
    entry = DATASETS[name]
    trees.write(tmp_path / "anything", trees.files(entry))
    trees.check(trees.load(name, tmp_path / "anything"), entry)


SPELLINGS: list[tuple[str, str, dict[str, str], dict[str, str]]] = [
    ("office_home", "{domain}/{label}/{file}", {"Real_World": "Real World"}, {"Alarm_Clock": "Alarm Clock"}),
    ("office_home", "{domain}/{label}/{file}", {"Real_World": "RealWorld", "Art": "ART"}, {"TV": "tv"}),
    ("office_home", "{domain}/train|val/{label}/{file}", {"Real_World": "real_world", "Art": "art"}, {}),
    ("office_home", "{domain}/{label}/{file}", {"Real_World": "Real"}, {"ToothBrush": "Toothbrush"}),
    (
        "vlcs",
        "{domain}/train|crossval|test/{label}/{file}",
        {"Caltech101": "CALTECH", "LabelMe": "LABELME", "SUN09": "SUN", "VOC2007": "PASCAL"},
        {"bird": "0", "car": "1", "chair": "2", "dog": "3", "person": "4"},
    ),
    (
        "vlcs",
        "{domain}/full|test/{label}/{file}",
        {"Caltech101": "caltech", "LabelMe": "labelme", "SUN09": "sun", "VOC2007": "pascal"},
        {"bird": "0", "car": "1", "chair": "2", "dog": "3", "person": "4"},
    ),
    (
        "terra_incognita",
        "{domain}/{label}/{file}",
        {"location_100": "L100", "location_38": "38", "location_43": "Location 43"},
        {"empty": "landscape"},
    ),
    ("pacs", "{domain}/{label}/{file}", {"art_painting": "Art Painting", "photo": "PHOTO"}, {"dog": "Dog"}),
    ("domainnet", "{domain}/{label}/{file}", {"real": "Real"}, {"t-shirt": "t_shirt", "cat": "Cat"}),
]


@pytest.mark.parametrize(
    ("name", "template", "domains", "classes"),
    SPELLINGS,
    ids=[f"{row[0]}-{next(iter(row[2].values()))}" for row in SPELLINGS],
)
def test_other_spellings_of_domains_and_classes(
    trees: Trees, tmp_path: Path, name: str, template: str, domains: dict[str, str], classes: dict[str, str]
) -> None:
    entry = DATASETS[name]
    files = trees.files(entry, template, domains=domains, classes=classes)
    trees.write(tmp_path / "data" / entry.source.folders[0], files)
    trees.check(trees.load(name, tmp_path / "data"), entry)


def test_all_four_folders_of_vlcs_count_no_image_twice(trees: Trees, tmp_path: Path) -> None:
    entry = DATASETS["vlcs"]
    files = trees.files(entry, "{domain}/train|crossval|test/{label}/{file}", count=3)
    again = {
        path.replace("/train/", "/full/").replace("/crossval/", "/full/"): content
        for path, content in files.items()
        if "/test/" not in path
    }
    trees.write(tmp_path / "data" / "VLCS", files | again)
    trees.check(trees.load("vlcs", tmp_path / "data"), entry, 3)


def test_same_file_names_in_two_folders_have_one_order(trees: Trees, tmp_path: Path) -> None:
    entry = DATASETS["vlcs"]
    files = {
        f"{domain}/{part}/{name}/1.png": trees.pixel(d, label, number)
        for d, domain in enumerate(entry.domains)
        for label, name in enumerate(entry.classes)
        for number, part in enumerate(("crossval", "test", "train"))
    }
    trees.write(tmp_path / "folder" / "VLCS", files)
    trees.archive(tmp_path / "archive" / "VLCS" / "x.zip", files)
    one, other = (trees.load("vlcs", tmp_path / form) for form in ("folder", "archive"))
    trees.same(one, other)
    assert one.domains["SUN09"].images[:, 2, 0, 0].tolist() == [0, 1, 2] * 5


def test_an_unpacked_image_wins_over_its_copy_in_an_archive(trees: Trees, tmp_path: Path) -> None:
    entry = DATASETS["pacs"]
    files = trees.files(entry)
    old = dict.fromkeys(files, b"not an image")
    trees.write(tmp_path / "data" / "PACS", files)
    trees.archive(tmp_path / "data" / "PACS" / "PACS.zip", old)
    trees.check(trees.load("pacs", tmp_path / "data"), entry)


def test_linked_folders_and_images(trees: Trees, tmp_path: Path) -> None:
    entry = DATASETS["pacs"]
    store = trees.write(tmp_path / "store", trees.files(entry))
    root = tmp_path / "data" / "PACS"
    for domain in entry.domains[1:]:
        root.mkdir(parents=True, exist_ok=True)
        (root / domain).symlink_to(store / domain)
    for path in sorted((store / entry.domains[0]).rglob("*.png")):
        link = root / path.relative_to(store)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    trees.check(trees.load("pacs", tmp_path / "data"), entry)
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "pacs").symlink_to(root)
    trees.check(trees.load("pacs", linked), entry)


@pytest.mark.parametrize("name", SMALL)
def test_hidden_litter_and_other_files_change_nothing(trees: Trees, tmp_path: Path, name: str) -> None:
    entry = DATASETS[name]
    files = trees.files(entry)
    domain, label = entry.domains[0], entry.classes[0]
    litter = [
        "README.txt",
        ".DS_Store",
        f"{domain}/Thumbs.db",
        f"{domain}/{label}/.img1.png",
        f"{domain}/{label}/notes.md",
        f"__MACOSX/{domain}/{label}/._img2.png",
        f"__MACOSX/{domain}/{label}/img2.png",
        f".git/{domain}/{label}/img2.png",
    ]
    dirty = files | dict.fromkeys(litter, b"x")
    trees.write(tmp_path / "folder" / entry.source.folders[0], dirty)
    trees.archive(tmp_path / "archive" / entry.source.folders[0] / "x.zip", dirty)
    one, other = (trees.load(name, tmp_path / form) for form in ("folder", "archive"))
    trees.check(one, entry)
    trees.same(one, other)


def test_unicode_paths(trees: Trees, tmp_path: Path) -> None:
    entry = DATASETS["pacs"]
    files = trees.files(entry, prefix="Bilder für 日本/")
    renamed = {path.replace("img", "ñandú "): content for path, content in files.items()}
    for form, write in (("folder", trees.write), ("archive", lambda p, f: trees.archive(p / "ü.zip", f))):
        write(tmp_path / form / "PACS", renamed)
    one, other = (trees.load("pacs", tmp_path / form) for form in ("folder", "archive"))
    trees.same(one, other)
    assert one.domains["photo"].paths[0] == "Bilder für 日本/photo/dog/ñandú 2.png"


# --- What is wrong is one clear line ------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREES)
def test_nothing_there_says_what_to_put_where(tmp_path: Path, name: str) -> None:
    entry = DATASETS[name]
    line = refused(name, tmp_path / "data")
    assert line.startswith(f"{name} was not found in '{tmp_path / 'data'}': vicinal data get {name}, or put ")
    assert f"into '{tmp_path / 'data' / entry.source.folders[0]}' as " in line
    assert f"{entry.domains[0]}/{entry.classes[0]}/*.jpg" in line
    assert line.endswith(f"from {entry.home}")


def test_a_wrong_layout_is_not_found(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path / "data" / "PACS", trees.files(DATASETS["pacs"], "{label}/{domain}/{file}"))
    assert "as art_painting/dog/*.jpg" in refused("pacs", tmp_path / "data")
    trees.write(tmp_path / "flat" / "PACS", {"photo_dog_1.png": trees.pixel()})
    assert "as art_painting/dog/*.jpg" in refused("pacs", tmp_path / "flat")


def test_a_missing_domain_is_named(trees: Trees, tmp_path: Path) -> None:
    root = trees.write(tmp_path / "data" / "PACS", trees.files(DATASETS["pacs"]))
    for domain in ("photo", "sketch"):
        shutil.rmtree(root / domain)
    line = refused("pacs", tmp_path / "data")
    assert line.startswith(f"'{root}' has no images of photo, sketch: ")


@pytest.mark.parametrize("how", ["no folder", "empty folder", "no images"])
def test_a_missing_class_is_named(trees: Trees, tmp_path: Path, how: str) -> None:
    root = trees.write(tmp_path / "data" / "PACS", trees.files(DATASETS["pacs"]))
    shutil.rmtree(root / "photo" / "horse")
    if how != "no folder":
        (root / "photo" / "horse").mkdir()
    if how == "no images":
        (root / "photo" / "horse" / "a.txt").touch()
    line = refused("pacs", tmp_path / "data")
    assert line == "class 'horse' of domain 'photo' has no readable image: add one"


def test_extra_folders_are_left_out(trees: Trees, tmp_path: Path) -> None:
    entry = DATASETS["pacs"]
    extra = ["photo/unicorn/1.png", "watercolour/dog/1.png", "photo/dog/small/1.png", "loose.png"]
    trees.write(tmp_path / "data" / "PACS", trees.files(entry) | dict.fromkeys(extra, trees.pixel()))
    trees.check(trees.load("pacs", tmp_path / "data"), entry)


@pytest.mark.parametrize("form", ["folder", "x.tar", "deflated.zip"])
def test_an_empty_image_is_refused_or_skipped(trees: Trees, tmp_path: Path, form: str) -> None:
    files = trees.files(DATASETS["pacs"], count=3) | {"photo/dog/img10.png": b""}
    root = tmp_path / "data" / "PACS"
    if form == "folder":
        trees.write(root, files)
    else:
        trees.archive(root / form, files)
    line = refused("pacs", tmp_path / "data")
    assert "photo/dog/img10.png: the file is empty; mend or remove it, or pass --skip-bad" in line
    data = trees.load("pacs", tmp_path / "data", skip_bad=True)
    assert len(data.bad) == 1
    photo = data.domains["photo"]
    assert len(photo.images) == len(photo.test) == len(photo.train) + len(photo.val) == 20
    assert photo.images[:2, 2, 0, 0].tolist() == [2, 11]


@pytest.mark.parametrize("content", [b"", b"<!doctype html>", b"PK\x03\x04cut off"])
@pytest.mark.parametrize("name", ["PACS.zip", "pacs-photo.tar"])
def test_an_archive_that_is_none_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(content)
    line = refused("pacs", tmp_path / "data")
    assert line.startswith(f"'{tmp_path / 'data' / name}' cannot be read as an archive (")


# --- TerraIncognita as its authors publish it ---------------------------------------------------------------

KINDS = [*DATASETS["terra_incognita"].classes, "car", "deer"]
PLACES = [100, 38, 43, 46, 7]


def terra(trees: Trees, root: Path, flat: str = "eccv_18_all_images_sm/") -> dict[str, Any]:
    """Write flat images, two of each kind at each place, and return the annotations of all of them."""
    files, images, annotations = {}, [], []
    for d, place in enumerate(PLACES):
        for label, _ in enumerate(KINDS):
            for number in (2, 10):
                name = f"p{place}-k{label}-img{number}"
                files[f"{flat}{name}.png"] = trees.pixel(d, label, number)
                images.append({"id": name, "file_name": f"{name}.png", "location": place})
                # Two boxes around animals of one kind are one picture.
                annotations += 2 * [{"image_id": name, "category_id": 30 + label}]
    trees.write(root, files)
    categories = [{"id": 30 + label, "name": kind} for label, kind in enumerate(KINDS)]
    return {"images": images, "annotations": annotations, "categories": categories}


def check_terra(data: Any) -> None:
    assert list(data.domains) == ["location_100", "location_38", "location_43", "location_46"]
    for position, domain in enumerate(data.domains.values()):
        red, green, blue = domain.images[:, :, 0, 0].long().unbind(1)
        assert domain.labels.tolist() == red.tolist() == [k for k in range(10) for _ in range(2)]
        assert set((green // 16).tolist()) == {position}
        assert blue.tolist() == [2, 10] * 10
        assert domain.labels[domain.val].tolist() == list(range(10))
    assert data.facts["layout"] == "original"


def write_annotations(root: Path, found: dict[str, Any], form: str) -> None:
    if form != "eccv_18":
        # There locations are text.
        images = [image | {"location": str(image["location"])} for image in found["images"]]
        (root / form).write_text(json.dumps(found | {"images": images}))
        return
    folder = root / "eccv_18_annotation_files"
    folder.mkdir()
    for k, part in enumerate(("cis_test", "cis_val", "train", "trans_test", "trans_val")):
        images = found["images"][k::5]
        named = {image["id"] for image in images}
        annotations = [entry for entry in found["annotations"] if entry["image_id"] in named]
        content = {"images": images, "annotations": annotations, "categories": found["categories"]}
        (folder / f"{part}_annotations.json").write_text(json.dumps(content))


@pytest.mark.parametrize("form", ["eccv_18", "caltech_images_20210113.json", "caltech_camera_traps.json"])
def test_terra_from_its_annotations(trees: Trees, tmp_path: Path, form: str) -> None:
    root = tmp_path / "data" / "terra_incognita"
    write_annotations(root, terra(trees, root), form)
    check_terra(trees.load("terra_incognita", tmp_path / "data"))


def test_terra_from_its_annotations_and_an_archive(trees: Trees, tmp_path: Path) -> None:
    root = tmp_path / "data" / "terra_incognita"
    found = terra(trees, tmp_path / "loose")
    files = {f"sm/{path.name}": path.read_bytes() for path in (tmp_path / "loose").rglob("*.png")}
    trees.archive(root / "eccv_18_all_images_sm.tar", files)
    write_annotations(root, found, "eccv_18")
    check_terra(trees.load("terra_incognita", tmp_path / "data"))


def test_a_terra_picture_of_two_animals_counts_twice_and_a_missing_one_not_at_all(
    trees: Trees, tmp_path: Path
) -> None:
    root = tmp_path / "data" / "terra"
    found = terra(trees, root)
    found["annotations"].append({"image_id": "p38-k0-img2", "category_id": 31})
    found["images"].append({"id": "gone", "file_name": "gone.png", "location": 38})
    found["annotations"].append({"image_id": "gone", "category_id": 31})
    write_annotations(root, found, "eccv_18")
    domain = trees.load("terra_incognita", tmp_path / "data").domains["location_38"]
    assert domain.labels.bincount().tolist() == [2, 3, *[2] * 8]
    assert sum(path.endswith("p38-k0-img2.png") for path in domain.paths) == 2


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"images": [], "annotations": [{}], "categories": []}', '{"images": 3}', "\xff"],
)
def test_terra_annotations_that_are_none(trees: Trees, tmp_path: Path, content: str) -> None:
    root = tmp_path / "data" / "terra"
    terra(trees, root)
    (root / "caltech_images_20210113.json").write_bytes(content.encode("latin-1"))
    line = refused("terra_incognita", tmp_path / "data")
    assert "caltech_images_20210113.json' is not the annotation file expected" in line


def test_terra_annotations_alone_or_images_alone_are_not_found(trees: Trees, tmp_path: Path) -> None:
    terra(trees, tmp_path / "images" / "terra")
    assert "terra_incognita was not found" in refused("terra_incognita", tmp_path / "images")
    root = tmp_path / "json" / "terra"
    root.mkdir(parents=True)
    write_annotations(root, {"images": [], "annotations": [], "categories": []}, "eccv_18")
    assert "terra_incognita was not found" in refused("terra_incognita", tmp_path / "json")
