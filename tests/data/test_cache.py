"""Decoded images on disk: the pixels of a fresh decoding, made once, made again when anything is amiss."""

import json
import os
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vicinal.data import cache as module
from vicinal.data.cache import Decoded, decode_cached, default_cache
from vicinal.data.files import ImageFile, list_archive, plain_file
from vicinal.data.images import Decoding, decode_image
from vicinal.errors import DataError

HOW = Decoding(8, 3)
COUNT = 5


def write_pictures(folder: Path, count: int = COUNT, seed: int = 0) -> list[Path]:
    """Write images of noise, none square, none like another."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    paths = [folder / f"{index}.png" for index in range(count)]
    for index, path in enumerate(paths):
        Image.fromarray(rng.integers(0, 256, (9 + index, 14, 3), dtype=np.uint8)).save(path)
    return paths


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return write_pictures(tmp_path / "pictures")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(paths: Sequence[Path], cache: Path, how: Decoding = HOW, **options: Any) -> Decoded:
    return decode_cached([plain_file(path) for path in paths], how, cache, **options)


def fresh(paths: Sequence[Path], how: Decoding = HOW) -> torch.Tensor:
    return torch.stack([decode_image(path, how.size, how.channels, how.fit) for path in paths])


def entries(cache: Path) -> list[Path]:
    """Return the folders of decoded images; nothing half-made may lie beside them."""
    found = [path for path in cache.iterdir() if path.name != "known"]
    assert all(path.is_dir() and not path.name.endswith(".part") for path in found), found
    assert not list(cache.rglob("*.part"))
    return found


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function after which reading an image file, or decoding one, is a failure."""

    def refuse(*args: object) -> None:
        raise AssertionError("not again")

    def forbid(what: str) -> None:
        if what == "reading":
            monkeypatch.setattr(ImageFile, "read", refuse)
        monkeypatch.setattr(module, "decode_in_order", refuse)

    return forbid


@pytest.mark.parametrize("how", [HOW, Decoding(6, 1), Decoding(12, 3, "squash")])
def test_the_pixels_are_those_of_a_fresh_decoding(paths: list[Path], cache: Path, how: Decoding) -> None:
    for _ in range(2):
        found = load(paths, cache, how)
        assert found.images.dtype == torch.uint8
        assert torch.equal(found.images, fresh(paths, how))
        assert found.kept == tuple(range(COUNT))
        assert found.bad == ()
    assert len(entries(cache)) == 1


def test_a_second_load_reads_no_image_file(paths: list[Path], cache: Path, forbid: Any) -> None:
    expected = load(paths, cache).images.clone()
    forbid("reading")
    counted: list[int] = []
    again = load(paths, cache, progress=lambda done, total: counted.append(done))
    assert torch.equal(again.images, expected)
    assert counted == []


def test_images_in_an_archive(paths: list[Path], cache: Path, tmp_path: Path, forbid: Any) -> None:
    archive = Path(shutil.make_archive(str(tmp_path / "pictures"), "tar", tmp_path / "pictures"))
    files = sorted(list_archive(archive), key=lambda file: file.name)
    assert torch.equal(decode_cached(files, HOW, cache).images, fresh(paths))
    forbid("decoding")  # the same bytes in the open
    assert torch.equal(load(paths, cache).images, fresh(paths))


def test_progress_counts_every_image(paths: list[Path], cache: Path) -> None:
    counted: list[tuple[int, int]] = []
    load(paths, cache, progress=lambda done, total: counted.append((done, total)))
    assert counted == [(done, COUNT) for done in range(1, COUNT + 1)]


def test_copies_and_touched_files_share_one_entry(
    paths: list[Path], cache: Path, tmp_path: Path, forbid: Any
) -> None:
    expected = load(paths, cache).images.clone()
    forbid("decoding")
    copies = [tmp_path / "elsewhere" / f"other-{path.name}" for path in paths]
    copies[0].parent.mkdir()
    for path, copy in zip(paths, copies, strict=True):
        shutil.copyfile(path, copy)
    assert torch.equal(load(copies, cache).images, expected)
    for path in paths:
        os.utime(path, ns=(1, 1))
    assert torch.equal(load(paths, cache).images, expected)
    assert len(entries(cache)) == 1
    forbid("reading")  # each place is known now
    load(copies, cache)
    load(paths, cache)


def test_a_lost_or_broken_note_costs_a_look_at_the_files_only(
    paths: list[Path], cache: Path, forbid: Any
) -> None:
    expected = load(paths, cache).images.clone()
    forbid("decoding")
    for content in ("", "[1]", '{"key": 3}', '{"key": ""}', '{"key": "gone"}', None):
        for note in (cache / "known").glob("*.json"):
            note.unlink() if content is None else note.write_text(content)
        assert torch.equal(load(paths, cache).images, expected)
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("change", ["image", "order", "size", "channels", "fit", "fewer", "version"])
def test_other_content_is_another_entry(
    paths: list[Path], cache: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load(paths, cache).images.clone()
    how = HOW
    if change == "image":
        pixels = np.asarray(Image.open(paths[2])).copy()
        Image.fromarray(255 - pixels).save(paths[2])
    elif change == "order":
        paths = paths[::-1]
    elif change == "fewer":
        paths = paths[1:]
    elif change == "version":
        monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    else:
        other = {"size": (9, 3, "crop"), "channels": (8, 1, "crop"), "fit": (8, 3, "squash")}
        how = Decoding(*other[change])  # type: ignore[arg-type]
    found = load(paths, cache, how)
    assert torch.equal(found.images, fresh(paths, how))
    assert len(entries(cache)) == 2
    if change == "image":
        assert torch.equal(found.images[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
        assert not torch.equal(found.images[2], before[2])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))


def _edit(path: Path, **values: Any) -> None:
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, **values}))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda entry: os.truncate(entry / "images.u8", 100),
    "longer": lambda entry: (entry / "images.u8").open("ab").write(b"x"),
    "empty": lambda entry: (entry / "images.u8").write_bytes(b""),
    "flipped": lambda entry: _flip(entry / "images.u8"),
    "no images": lambda entry: (entry / "images.u8").unlink(),
    "no meta": lambda entry: (entry / "meta.json").unlink(),
    "meta is text": lambda entry: (entry / "meta.json").write_text("{"),
    "meta is a list": lambda entry: (entry / "meta.json").write_text("[]"),
    "meta is bytes": lambda entry: (entry / "meta.json").write_bytes(b"\xff\xfe"),
    "meta is empty": lambda entry: (entry / "meta.json").write_text("{}"),
    "shape is text": lambda entry: _edit(entry / "meta.json", shape="big"),
    "shape of another": lambda entry: _edit(entry / "meta.json", shape=[COUNT + 1, 3, 8, 8]),
    "bad is a number": lambda entry: _edit(entry / "meta.json", bad=3),
    "nothing": lambda entry: shutil.rmtree(entry),
    "a hollow folder": lambda entry: [shutil.rmtree(entry), entry.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_made_again(paths: list[Path], cache: Path, damage: str) -> None:
    load(paths, cache)
    (entry,) = entries(cache)
    DAMAGE[damage](entry)
    counted: list[int] = []
    found = load(paths, cache, progress=lambda done, total: counted.append(done))
    assert torch.equal(found.images, fresh(paths))
    assert len(counted) == COUNT
    assert entries(cache) == [entry]
    load(paths, cache, progress=lambda done, total: counted.append(done))
    assert len(counted) == COUNT


def test_an_entry_that_was_only_touched_is_read_through_once(
    paths: list[Path], cache: Path, forbid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(paths, cache)
    os.utime(entries(cache)[0] / "images.u8", ns=(1, 1))
    forbid("reading")
    sums: list[Path] = []
    crc32 = module._crc32
    monkeypatch.setattr(module, "_crc32", lambda path: [sums.append(path), crc32(path)][1])
    for _ in range(3):
        assert torch.equal(load(paths, cache).images[0], torch.from_numpy(_first_row(cache)))
    assert len(sums) == 1


def _first_row(cache: Path) -> np.ndarray:
    return np.fromfile(entries(cache)[0] / "images.u8", dtype=np.uint8)[: 3 * 64].reshape(3, 8, 8)


def test_what_a_killed_process_left_half_written_is_swept_away(
    paths: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **options: None)  # it has no time to tidy up
        with pytest.raises(KeyboardInterrupt):
            load(paths, cache, progress=stop)
    (half,) = cache.glob("*.part")
    (half / "images.u8").write_bytes(b"half")
    (half / "deeper").mkdir()
    assert torch.equal(load(paths, cache).images, fresh(paths))
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_interrupt_leaves_nothing_behind(
    paths: list[Path], cache: Path, error: type[BaseException]
) -> None:
    def stop(done: int, total: int) -> None:
        if done == 3:
            raise error

    with pytest.raises(error):
        load(paths, cache, progress=stop)
    assert entries(cache) == []
    assert torch.equal(load(paths, cache).images, fresh(paths))


def test_nothing_and_nothing_but_bad_images(cache: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert load([], cache).images.shape == (0, 3, 8, 8)
    (tmp_path / "a.png").write_bytes(b"text")
    for _ in range(2):
        found = load([tmp_path / "a.png"], cache, skip_bad=True)
        assert found.images.shape == (0, 3, 8, 8)
        assert found.kept == ()
        assert len(found.bad) == 1


@pytest.fixture
def damaged(paths: list[Path]) -> list[Path]:
    """Return five images of which the second is text and the fourth missing."""
    paths[1].write_bytes(b"text")
    paths[3].unlink()
    return paths


def test_bad_images_are_left_out_and_listed(damaged: list[Path], cache: Path) -> None:
    for _ in range(2):
        found = load(damaged, cache, skip_bad=True)
        assert found.kept == (0, 2, 4)
        assert torch.equal(found.images, fresh([damaged[k] for k in found.kept]))
        assert [line.partition(": ")[0] for line in found.bad] == [str(damaged[1]), str(damaged[3])]
        assert "not an image that Pillow can read" in found.bad[0]
        assert "No such file" in found.bad[1]


def test_a_bad_image_is_one_line_and_nothing_is_kept(damaged: list[Path], cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match=r"1\.png: not an image .*--skip-bad") as caught:
            load(damaged, cache)
        assert "\n" not in str(caught.value)
        assert entries(cache) == []


def test_a_cache_made_with_skip_bad_still_refuses_without(damaged: list[Path], cache: Path) -> None:
    with pytest.raises(DataError) as first:
        load(damaged, cache)
    load(damaged, cache, skip_bad=True)
    with pytest.raises(DataError) as later:
        load(damaged, cache)
    assert str(later.value) == str(first.value)


def test_a_mended_image_is_seen(damaged: list[Path], cache: Path) -> None:
    load(damaged, cache, skip_bad=True)
    Image.new("RGB", (9, 9), "red").save(damaged[1])
    assert load(damaged, cache, skip_bad=True).kept == (0, 1, 2, 4)
    Image.new("RGB", (9, 9), "blue").save(damaged[3])
    assert torch.equal(load(damaged, cache).images, fresh(damaged))


def test_a_bad_image_is_named_where_it_lies_now(damaged: list[Path], cache: Path, tmp_path: Path) -> None:
    load(damaged, cache, skip_bad=True)
    moved = [tmp_path / "moved" / path.name for path in damaged]
    (tmp_path / "pictures").rename(tmp_path / "moved")
    assert [line.partition(": ")[0] for line in load(moved, cache, skip_bad=True).bad] == [
        str(moved[1]),
        str(moved[3]),
    ]


def test_a_file_that_could_not_be_read_once_is_tried_again(
    paths: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ImageFile.read

    def read(self: ImageFile) -> bytes:
        if self.path == str(paths[2]):
            raise PermissionError(13, "Permission denied")
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(ImageFile, "read", read)
        assert load(paths, cache, skip_bad=True).kept == (0, 1, 3, 4)
    # Neither size nor time of a file change with its permissions, or when a disk is there again.
    assert torch.equal(load(paths, cache, skip_bad=True).images, fresh(paths))


def test_a_cache_that_cannot_be_made_is_one_line(paths: list[Path], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    for cache in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(DataError, match=r"cannot be written .*set VICINAL_CACHE") as caught:
            load(paths, cache)
        assert str(cache) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder in which this test, though run by root, may write only what is not guarded."""
    if os.name != "posix":
        pytest.skip("permissions are not POSIX's here")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)
            for path in (folder, *folder.rglob("*")):
                path.chmod(0o777)


@pytest.fixture
def read_only(guarded: Path) -> tuple[list[Path], Path]:
    """Return images and a cache that has them, in which nothing may be written any more."""
    paths, cache = write_pictures(guarded / "pictures"), guarded / "cache"
    load(paths, cache)
    (entry,) = entries(cache)
    os.utime(entry / "images.u8", ns=(1, 1))
    for folder in (cache, cache / "known", entry):
        folder.chmod(0o555)
    return paths, cache


def test_a_cache_that_may_only_be_read_serves_what_it_has(read_only: tuple[list[Path], Path]) -> None:
    for _ in range(2):
        assert torch.equal(load(*read_only).images, fresh(read_only[0]))


def test_a_cache_that_may_only_be_read_says_so_in_one_line(read_only: tuple[list[Path], Path]) -> None:
    paths, cache = read_only
    with pytest.raises(DataError, match=r"cannot be written \(Permission denied\).*VICINAL_CACHE") as caught:
        load(paths[1:], cache)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_line(paths: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage, needed = namedtuple("usage", ["total", "used", "free"]), COUNT * 3 * 64
    free = needed + module.SPARE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, free - 1))
    how = f"need {needed / 1e9:.1f} GB .*{free / 1e9:.1f} GB free: set VICINAL_CACHE to a larger disk"
    with pytest.raises(DataError, match=how) as caught:
        load(paths, cache)
    assert str(cache) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert entries(cache) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 0, free))
    assert torch.equal(load(paths, cache).images, fresh(paths))


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("VICINAL_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "mine"
    for empty in ("", None):
        if empty is None:
            monkeypatch.delenv("VICINAL_CACHE")
        else:
            monkeypatch.setenv("VICINAL_CACHE", empty)
        assert default_cache() == tmp_path / "xdg" / "vicinal"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == tmp_path / "home" / ".cache" / "vicinal"
