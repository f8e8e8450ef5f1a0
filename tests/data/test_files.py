import io
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from vicinal.data.files import (
    IMAGE_SUFFIXES,
    ImageFile,
    is_image_name,
    list_archive,
    list_images,
    list_tree,
    natural_key,
    plain_file,
    printable,
    strangers,
    visible,
    walk,
)
from vicinal.errors import DataError

Trees = Any  # of conftest.py

FILES = {
    "a/1.png": b"first",
    "a/2.JPG": b"second" * 1000,  # so that packing shows
    "b/deep/er/3.webp": b"",
    "ü/日.png": bytes(range(256)),
}


def names(files: list[ImageFile]) -> list[str]:
    return sorted(file.name for file in files)


@pytest.mark.parametrize("kind", ["x.tar", "dotted.tar", "stored.zip", "deflated.zip"])
def test_members_are_read_where_they_lie(trees: Trees, tmp_path: Path, kind: str) -> None:
    path = trees.archive(tmp_path / kind, FILES | {"a/notes.txt": b"x", "a/.1.png": b"x"})
    found = list_archive(path)
    assert {file.name: file.read() for file in found} == FILES
    assert {file.path for file in found} == {str(path)}
    assert found[0].shown == f"{path}:{found[0].name}"
    if kind == "deflated.zip":
        assert path.stat().st_size < len(FILES["a/2.JPG"])


def test_a_plain_file_is_read_whole_and_named_from_its_root(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"first")
    file = plain_file(tmp_path / "a" / "1.png", tmp_path)
    assert (file.name, file.shown, file.read()) == ("a/1.png", str(tmp_path / "a" / "1.png"), b"first")
    assert plain_file(tmp_path / "a" / "1.png").name == (tmp_path / "a" / "1.png").as_posix()


def test_a_zip_with_extra_fields_and_data_before_it(tmp_path: Path) -> None:
    """The lengths in the local header differ from those in the directory: only the local ones count."""
    member = zipfile.ZipInfo("a/1.png")
    member.extra = b"\x99\x99\x04\x00abcd"
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as pack:
        pack.writestr(member, b"first")
        with pack.open(zipfile.ZipInfo("a/2.png"), "w", force_zip64=True) as out:
            out.write(b"second")
    path = tmp_path / "x.zip"
    path.write_bytes(b"#!/bin/sh\n" + body.getvalue())
    assert [file.read() for file in list_archive(path)] == [b"first", b"second"]


def test_long_names_and_links_in_a_tar(tmp_path: Path) -> None:
    long = "d" * 90 + "/" + "n" * 90 + ".png"
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in ((long, b"long"), ("ü" * 60 + "/日.png", b"wide")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, long
        tar.addfile(link)
        folder = tarfile.TarInfo("folder.png")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
    assert {file.name: file.read() for file in list_archive(tmp_path / "x.tar")} == {
        long: b"long",
        "ü" * 60 + "/日.png": b"wide",
    }


def test_a_hard_link_in_a_tar_is_the_image_it_links_to(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"first")
    os.link(tmp_path / "1.png", tmp_path / "2.png")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(tmp_path / "1.png", "1.png")
        tar.add(tmp_path / "2.png", "2.png")
    assert {file.name: file.read() for file in list_archive(tmp_path / "x.tar")} == {
        "1.png": b"first",
        "2.png": b"first",
    }


@pytest.mark.parametrize("content", [b"", b"<!doctype html><html>", b"PK\x03\x04rest", b"x" * 5000])
@pytest.mark.parametrize("suffix", [".tar", ".zip"])
def test_what_is_no_archive_is_one_line(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=rf"x\{suffix}' cannot be read as an archive \(.*\): get it anew"
    ) as e:
        list_archive(path)
    assert "\n" not in str(e.value)


def test_an_archive_that_was_cut_off_is_one_line(trees: Trees, tmp_path: Path) -> None:
    for kind in ("x.tar", "stored.zip"):
        path = trees.archive(tmp_path / kind, {"a/1.png": b"1" * 5000, "a/2.png": b"2" * 5000})
        path.write_bytes(path.read_bytes()[:7000])
        with pytest.raises(DataError, match="cannot be read as an archive"):
            list_archive(path)


def test_a_compressed_tar_under_a_plain_name_is_one_line(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w:gz"):
        pass
    with pytest.raises(DataError, match="cannot be read as an archive"):
        list_archive(tmp_path / "x.tar")


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_packed_in_an_uncommon_way_is_one_line(tmp_path: Path, packing: int) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w", packing) as pack:
        pack.writestr("a/1.png", b"x")
    with pytest.raises(DataError, match=r"a/1\.png is encrypted or packed in an uncommon way"):
        list_archive(tmp_path / "x.zip")


def test_an_encrypted_zip_is_one_line(trees: Trees, tmp_path: Path) -> None:
    path = trees.archive(tmp_path / "stored.zip", {"a/1.png": b"x"})
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="is encrypted"):
        list_archive(path)


def test_a_damaged_deflated_member_is_not_read_as_something_else(trees: Trees, tmp_path: Path) -> None:
    path = trees.archive(tmp_path / "deflated.zip", {"a/1.png": b"first" * 100})
    [file] = list_archive(path)
    content = bytearray(path.read_bytes())
    start = content.index(b"a/1.png") + len("a/1.png")
    content[start : start + 8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(Exception, match="Error -3"):
        file.read()


@pytest.mark.parametrize(
    ("name", "is_image"),
    [
        ("a/b/1.png", True),
        ("1.JPEG", True),
        ("a/1.txt", False),
        ("a/png", False),
        (".1.png", False),
        ("a/.thumbs/1.png", False),
        ("__MACOSX/a/1.png", False),
        ("a/._1.png", False),
        ("a b/ü 日.tif", True),
        ("a.b/1.png", True),
        ("a/1.eps", False),
        ("a/1.mpg", False),
    ],
)
def test_names_of_images(name: str, is_image: bool) -> None:
    assert is_image_name(name) is is_image


def test_a_tree_is_its_files_and_the_archives_directly_in_it(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path, {"a/1.png": b"unpacked", "deep/inner/2.png": b"x"})
    trees.archive(tmp_path / "one.zip", {"a/1.png": b"packed", "a/3.png": b"packed"})
    trees.archive(tmp_path / "two.tar", {"a/3.png": b"packed twice", "a/4.png": b"packed"})
    trees.archive(tmp_path / "deep" / "three.zip", {"a/5.png": b"too deep"})
    trees.write(tmp_path, {".hidden.zip": b"no archive", "four.tar.gz": b"no way in", "list.txt": b"x"})
    (tmp_path / "folder.zip").mkdir()
    found = list_tree(tmp_path)
    assert names(found) == ["a/1.png", "a/3.png", "a/4.png", "deep/inner/2.png"]
    content = {file.name: file.read() for file in found}
    assert content["a/1.png"] == b"unpacked"
    assert content["a/3.png"] == b"packed"


def test_walking_sorts_by_suffix_and_enters_folders_called_like_images(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path, {"x.png/1.png": b"", "a/10.png": b"", "a/9.png": b"", "a/b.gz": b"", "c.PNG": b""})
    os.mkfifo(tmp_path / "pipe.png")
    found = [path.relative_to(tmp_path).as_posix() for path in walk(tmp_path)]
    assert found == ["a/9.png", "a/10.png", "c.PNG", "x.png/1.png"]


def test_links_that_lead_round_or_nowhere(trees: Trees, tmp_path: Path) -> None:
    trees.write(tmp_path, {"a/1.png": b""})
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "self.png").symlink_to(tmp_path / "self.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    found = [path.relative_to(tmp_path).as_posix() for path in walk(tmp_path)]
    # Dangling images stay, to be reported as bad.
    assert found == ["a/1.png", "gone.png", "self.png"]


def test_listing_what_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match="cannot be listed: Permission denied"):
        visible(tmp_path)


def test_listing_images_of_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, said in (("gone", "does not exist"), ("file", "is not a folder")):
        with pytest.raises(DataError, match=f"{name}' {said}: give a folder of images"):
            list_images(tmp_path / name)
    with pytest.raises(DataError, match=r"holds no images, but 1 other files, as file: put files such as"):
        list_images(tmp_path)
    (tmp_path / "file").unlink()
    with pytest.raises(DataError, match=r"holds no images: put files such as \.jpg or \.png there"):
        list_images(tmp_path)


def test_what_does_not_look_like_an_image(trees: Trees, tmp_path: Path) -> None:
    names = ("IMG_1", "a/notes.txt", "a/b.zip", "c.png", "a/d.JPG", ".hidden", "__MACOSX/e")
    trees.write(tmp_path, dict.fromkeys(names, b""))
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    found = [path.relative_to(tmp_path).as_posix() for path in strangers(tmp_path)]
    assert found == ["a/b.zip", "a/notes.txt", "IMG_1"]


def test_natural_order() -> None:
    ordered = ["a1", "A2", "a02b", "a2b", "a10", "a10b", "B1", "b٣", "z"]
    shuffled = ordered[1::2] + ordered[::2]
    assert sorted(shuffled, key=natural_key) == ordered
    assert natural_key("a1") != natural_key("A1")


def test_suffixes_are_lower_case_and_without_what_pillow_cannot_decode() -> None:
    assert {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".webp", ".gif"} <= IMAGE_SUFFIXES
    assert not {".eps", ".ps", ".h5", ".hdf", ".mpg", ".wmf", ".zip", ".csv", ".txt"} & IMAGE_SUFFIXES
    assert all(suffix == suffix.lower() for suffix in IMAGE_SUFFIXES)


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX only")
def test_any_name_can_be_printed() -> None:
    odd = os.fsdecode(b"caf\xe9.png")
    assert printable(odd) == printable(Path(odd)) == "caf\ufffd.png"
    assert printable("日本/café") == "日本/café"
