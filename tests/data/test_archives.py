import gzip
import io
import os
import shutil
import stat
import tarfile
import threading
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vicinal.data import archives
from vicinal.data.archives import readable_size, require_space, unpack, wrong_kind
from vicinal.errors import DataError

MEMBERS = {
    "pacs/photo/dog/1.png": b"one",
    "pacs/photo/cat/2.png": b"two" * 999,
    "pacs/sketch/häßlich 3.png": b"",
    "readme.txt": b"read",
}
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>"
MODES = {".tar": "w", ".tar.gz": "w:gz", ".tgz": "w:gz", ".tar.bz2": "w:bz2", ".tar.xz": "w:xz"}


def make_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as pack:
        for name, content in members.items():
            pack.writestr(name, content)
    return path


def make_tar(path: Path, members: dict[str, bytes], odd: tarfile.TarInfo | None = None) -> Path:
    ending = next(ending for ending in reversed(MODES) if path.name.endswith(ending))
    with tarfile.open(path, MODES[ending]) as pack:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            pack.addfile(info, io.BytesIO(content))
        if odd is not None:
            pack.addfile(odd)
    return path


def make(path: Path, members: dict[str, bytes]) -> Path:
    return make_zip(path, members) if path.suffix == ".zip" else make_tar(path, members)


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below the folder but the hidden lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def refusal(archive: Path, folder: Path) -> str:
    """Return the one line an archive is refused with, having left nothing behind."""
    with pytest.raises(DataError) as caught:
        unpack(archive, folder)
    assert contents(folder) == {}
    assert not [path for path in folder.glob("*") if not path.name.startswith(".")]
    assert not list(folder.glob(".*.unpacking"))
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("ending", [".zip", *MODES])
def test_members_arrive_whole_and_nothing_else_stays(tmp_path: Path, ending: str) -> None:
    archive = make(tmp_path / f"data{ending}", MEMBERS)
    seen: list[tuple[str, int, int | None]] = []
    unpack(archive, tmp_path / "out" / "below", lambda *counts: seen.append(counts))
    assert contents(tmp_path / "out" / "below") == MEMBERS
    assert not list((tmp_path / "out" / "below").glob(".*.unpacking"))
    totals = {total for _, _, total in seen}
    done = [count for _, count, _ in seen]
    assert {name for name, _, _ in seen} == {archive.name}
    assert len(seen) == len(MEMBERS)
    assert len(totals) == 1
    assert done == sorted(done)
    assert 0 < done[-1] <= (totals.pop() or 0)


def test_the_archive_may_lie_in_the_folder_and_folders_there_are_merged(tmp_path: Path) -> None:
    archive = make(tmp_path / "data.zip", MEMBERS)
    (tmp_path / "pacs/photo/dog").mkdir(parents=True)
    (tmp_path / "pacs/photo/dog/own.png").write_bytes(b"own")
    (tmp_path / "pacs/photo/dog/1.png").write_bytes(b"older")
    unpack(archive, tmp_path)
    expected = MEMBERS | {"pacs/photo/dog/own.png": b"own", "data.zip": archive.read_bytes()}
    assert contents(tmp_path) == expected


def test_unpacking_twice_changes_nothing(tmp_path: Path) -> None:
    archive = make(tmp_path / "data.tar.gz", MEMBERS)
    unpack(archive, tmp_path / "out")
    unpack(archive, tmp_path / "out")
    assert contents(tmp_path / "out") == MEMBERS


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/pacs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"cannot be unpacked into '.*out' \(.*\): mend that and run again"):
        unpack(make(tmp_path / "data.zip", MEMBERS), tmp_path / "out")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(name: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    archive = make(tmp_path / "data.zip", MEMBERS)
    with pytest.raises(KeyboardInterrupt):
        unpack(archive, tmp_path / "out", interrupt)
    assert contents(tmp_path / "out") == {}


def test_what_a_killed_run_left_is_not_taken_for_members(tmp_path: Path) -> None:
    archive = make(tmp_path / "data.zip", MEMBERS)
    left = tmp_path / "out" / ".data.zip.unpacking" / "pacs" / "photo"
    left.mkdir(parents=True)
    (left / "half.png").write_bytes(b"ha")
    unpack(archive, tmp_path / "out")
    assert contents(tmp_path / "out") == MEMBERS


def test_nothing_is_in_place_before_the_last_member_is_written(tmp_path: Path) -> None:
    archive = make(tmp_path / "data.tar", MEMBERS)
    visible: list[list[str]] = []

    def look(name: str, done: int, total: int | None) -> None:
        visible.append([path.name for path in (tmp_path / "out").iterdir() if path.name[0] != "."])

    unpack(archive, tmp_path / "out", look)
    assert visible == [[]] * len(MEMBERS)


def test_two_at_once_wait_for_each_other(tmp_path: Path) -> None:
    archive = make(tmp_path / "data.zip", MEMBERS)
    written: list[int] = []
    met = threading.Event()

    def note(name: str, done: int, total: int | None) -> None:
        written.append(threading.get_ident())
        if len(set(written)) > 1:
            met.set()
        # The first one stays inside long enough for the other to come in, were it let.
        met.wait(0.1 if len(written) == 1 else 0)

    threads = [threading.Thread(target=unpack, args=(archive, tmp_path / "out", note)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    # All members of the one come before the first of the other.
    turns = sum(one != other for one, other in pairwise(written))
    assert (len(written), turns) == (2 * len(MEMBERS), 1)
    assert contents(tmp_path / "out") == MEMBERS


def test_a_single_compressed_file_is_left_as_it_is(tmp_path: Path) -> None:
    single = tmp_path / "train-images-idx3-ubyte.gz"
    single.write_bytes(gzip.compress(b"idx"))
    unpack(single, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["../out.txt", "a/../../out.txt", "/tmp/out.txt", "..\\out.txt", "C:\\out.txt"]
)
@pytest.mark.parametrize("ending", [".zip", ".tar", ".tar.gz"])
def test_members_that_leave_the_folder_are_refused(tmp_path: Path, ending: str, name: str) -> None:
    archive = make(tmp_path / f"data{ending}", {"good.txt": b"good", name: b"bad"})
    line = refusal(archive, tmp_path / "out")
    assert line == f"{archive.as_posix()}: refused, '{name}' in it leads out of the folder: use another copy"


@pytest.mark.parametrize(
    ("kind", "target", "why"),
    [
        (tarfile.SYMTYPE, "../../secret", "leads out of the folder"),
        (tarfile.SYMTYPE, "/etc/passwd", "leads out of the folder"),
        (tarfile.LNKTYPE, "../secret", "leads out of the folder"),
        (tarfile.CHRTYPE, "", "is a device"),
        (tarfile.FIFOTYPE, "", "is a device"),
    ],
)
def test_links_out_and_devices_in_a_tar_are_refused(
    tmp_path: Path, kind: bytes, target: str, why: str
) -> None:
    odd = tarfile.TarInfo("odd")
    odd.type, odd.linkname = kind, target
    line = refusal(make_tar(tmp_path / "data.tar", {"good.txt": b"good"}, odd), tmp_path / "out")
    assert f"refused, 'odd' in it {why}: use another copy" in line


def test_a_link_that_stays_inside_a_tar_is_kept(tmp_path: Path) -> None:
    link = tarfile.TarInfo("pacs/again.txt")
    link.type, link.linkname = tarfile.SYMTYPE, "../readme.txt"
    unpack(make_tar(tmp_path / "data.tar", MEMBERS, link), tmp_path / "out")
    assert (tmp_path / "out/pacs/again.txt").read_bytes() == b"read"


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR])
def test_links_and_devices_in_a_zip_are_refused(tmp_path: Path, kind: int) -> None:
    info = zipfile.ZipInfo("odd")
    info.create_system, info.external_attr = 3, (kind | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as pack:
        pack.writestr(info, "/etc/passwd")
    assert "'odd' in it is a link or a device" in refusal(tmp_path / "data.zip", tmp_path / "out")


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    raw = bytearray(make_zip(tmp_path / "data.zip", {"a.txt": b"a"}).read_bytes())
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "data.zip").write_bytes(raw)
    assert "'a.txt' in it is encrypted" in refusal(tmp_path / "data.zip", tmp_path / "out")


def test_a_member_with_a_line_break_still_makes_one_line(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "data.zip", {"../a\nb": b""})
    assert "'../a?b' in it" in refusal(archive, tmp_path / "out")


def test_backslashes_of_windows_zips_part_folders(tmp_path: Path) -> None:
    unpack(make_zip(tmp_path / "data.zip", {"photo\\": b"", "photo\\dog\\1.png": b"one"}), tmp_path / "out")
    assert contents(tmp_path / "out") == {"photo/dog/1.png": b"one"}


@pytest.mark.parametrize("ending", [".zip", ".tar", ".tar.gz"])
@pytest.mark.parametrize("share", [0.4, 0.9])
def test_a_cut_archive_is_damaged(tmp_path: Path, ending: str, share: float) -> None:
    noise = os.urandom(4000)
    archive = make(tmp_path / f"data{ending}", {"a.bin": noise, "b.bin": noise, "c.bin": noise})
    whole = archive.read_bytes()
    archive.write_bytes(whole[: int(share * (12000 if ending == ".tar" else len(whole)))])
    line = refusal(archive, tmp_path / "out")
    assert "the archive is damaged, or not a zip or tar (" in line
    assert line.endswith("): delete it and download it again")


def test_a_tar_cut_between_two_members_is_damaged(tmp_path: Path) -> None:
    archive = make(tmp_path / "data.tar", {"a.bin": b"x" * 512, "b.bin": b"y" * 512})
    archive.write_bytes(archive.read_bytes()[:1024])
    assert "(it ends too early)" in refusal(archive, tmp_path / "out")


def test_a_tar_with_a_spoilt_header_inside_is_damaged(tmp_path: Path) -> None:
    archive = make(tmp_path / "data.tar", {"a.bin": b"x" * 512, "b.bin": b"y" * 512})
    raw = bytearray(archive.read_bytes())
    raw[1024 + 5] ^= 0xFF
    archive.write_bytes(raw)
    assert "(it ends too early)" in refusal(archive, tmp_path / "out")


def test_a_flipped_bit_in_a_zip_is_damage(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as pack:
        pack.writestr("a.bin", b"x" * 100)
    raw = bytearray((tmp_path / "data.zip").read_bytes())
    raw[raw.index(b"xxxx")] ^= 1
    (tmp_path / "data.zip").write_bytes(raw)
    assert "the archive is damaged" in refusal(tmp_path / "data.zip", tmp_path / "out")


@pytest.mark.parametrize("name", ["data.zip", "data.tar", "data.tar.gz", "data.bin"])
def test_a_web_page_saved_as_an_archive_is_named_as_such(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(PAGE)
    line = refusal(tmp_path / name, tmp_path / "out")
    assert line.endswith(f"{name}: a web page instead of the file: delete it and download it again")


def test_another_kind_of_file_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(os.urandom(3000))
    assert "damaged, or not a zip or tar" in refusal(tmp_path / "weights.bin", tmp_path / "out")


def test_a_missing_archive_is_one_line(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "data.zip", tmp_path / "out")


def test_an_archive_that_does_not_fit_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make(tmp_path / "data.zip", {"big": bytes(2_500_000)})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_200_000))
    line = refusal(archive, tmp_path / "out")
    assert line.startswith("unpacking data.zip needs 2.5 MB, '")
    assert line.endswith("' has 1.2 MB free: free some disk space or choose another folder with --data-dir")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2_500_000))
    unpack(archive, tmp_path / "out")


def test_a_full_disk_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    archive = make(tmp_path / "data.zip", MEMBERS)
    monkeypatch.setattr(archives.shutil, "copyfileobj", full)
    assert "(No space left on device): mend that and run again" in refusal(archive, tmp_path / "out")


def bytes_of(write: Callable[[Path], object], path: Path) -> bytes:
    write(path)
    return path.read_bytes()[: archives.HEAD_BYTES]


def test_files_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    heads = {
        ".zip": bytes_of(lambda path: make_zip(path, MEMBERS), tmp_path / "a.zip"),
        ".tar": bytes_of(lambda path: make_tar(path, MEMBERS), tmp_path / "a.tar"),
        ".tar.gz": bytes_of(lambda path: make_tar(path, MEMBERS), tmp_path / "a.tar.gz"),
        ".npy": bytes_of(lambda path: np.save(path, np.zeros(3)), tmp_path / "a.npy"),
    }
    for ending in heads:
        found = {other: wrong_kind(f"A{ending.upper()}", head) is None for other, head in heads.items()}
        assert found == {other: other == ending for other in heads}
        assert wrong_kind(f"a{ending}", b"nothing of the kind") is not None


def test_an_old_tar_without_its_magic_word_is_still_a_tar(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a")
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[257:265] = bytes(8)
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    assert wrong_kind("a.tar", bytes(block)) is None


@pytest.mark.parametrize(
    "head",
    [
        PAGE,
        b"  \r\n\t" + PAGE,
        b"\xef\xbb\xbf\n" + PAGE,
        PAGE.decode().encode("utf-16"),
        b"<HTML lang=en>",
        b"<?xml version='1.0'?>\n<!DOCTYPE html PUBLIC>",
        b"<!-- saved --><html>",
    ],
)
@pytest.mark.parametrize("name", ["a.zip", "a.safetensors", "list.txt"])
def test_pages_are_seen_through_marks_and_blanks(head: bytes, name: str) -> None:
    assert wrong_kind(name, head) == "a web page instead of the file"
    assert wrong_kind("index.html", head) is None


def test_the_content_type_counts_where_the_bytes_do_not_speak() -> None:
    assert wrong_kind("a.zip", b"PK\x03\x04", "text/html") is None
    assert wrong_kind("list.txt", b"Not here", "text/html; charset=utf-8") == "a web page instead of the file"
    assert wrong_kind("list.txt", b"art/1.png 3\n", "text/plain") is None
    assert wrong_kind("list.txt", b"", "text/plain") == "an empty file"


def test_sizes_read_as_people_write_them(tmp_path: Path) -> None:
    sizes = (0, 999, 1500, 2_000_000, 12_345_000_000)
    assert [readable_size(size) for size in sizes] == ["0 bytes", "999 bytes", "1.5 kB", "2.0 MB", "12.3 GB"]
    require_space(tmp_path, 1, "this")
