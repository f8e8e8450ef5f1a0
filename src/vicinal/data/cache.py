"""Decoded images on disk, memory-mapped: decoded once, keyed by content, shared by processes.

A cache is a folder with one folder for each decoded set of images, named by what it was made of:

    <key>/images.u8     uint8 (N, C, H, W), row after row
    <key>/meta.json     shape, which images are missing and why, checksum
    known/<stamp>.json  the key of files with these sizes and times: a warm start reads none of them
"""

import contextlib
import functools
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from vicinal.data.files import ImageFile, printable
from vicinal.data.images import MAX_THREADS, Decoding, Progress, decode_in_order, tolerated
from vicinal.errors import DataError

VERSION = 2  # part of every key: raise it when the same bytes would decode to other pixels
CHUNK = 1 << 22
UNREADABLE = b"unreadable"
# Left free on the disk when a cache is written.
SPARE_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class Decoded:
    """Decoded images, the positions they had among the files, and "path: why" for the others."""

    images: Tensor
    kept: tuple[int, ...]
    bad: tuple[str, ...]


def default_cache() -> Path:
    """Return where decoded images go: VICINAL_CACHE, else the user's cache folder."""
    given = os.environ.get("VICINAL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else (Path(base) if base else Path.home() / ".cache") / "vicinal"


def decode_cached(
    files: Sequence[ImageFile],
    how: Decoding,
    cache: Path,
    *,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Decoded:
    """Return the images, memory-mapped; they are decoded only if the cache has none of this content.

    Without `skip_bad` the first bad image raises, and nothing is kept.
    """
    note = cache / "known" / f"{_stamp(files, how)}.json"
    entry = _open_known(note, cache)
    if entry is None:
        key, readable = _content_key(files, how)
        with _locked(cache, key):
            # Another process, or one with a copy of these images, may have made it while this one waited.
            entry = _open(cache / key) or _make(files, how, cache / key, skip_bad, progress)
            if readable:  # a file that cannot be read now may be readable later, at the same size and time
                _write_json(note, {"key": key})
    bad = tuple(f"{printable(files[position].shown)}: {why}" for position, why in entry.bad)
    if bad and not skip_bad:
        tolerated(DataError(bad[0]), skip_bad)
    gone = {position for position, _ in entry.bad}
    return Decoded(entry.images, tuple(k for k in range(len(files)) if k not in gone), bad)


@dataclass(frozen=True, eq=False)
class _Entry:
    """What the cache has of some content: images, and why the others could not be decoded."""

    images: Tensor
    bad: tuple[tuple[int, str], ...]


@contextmanager
def _locked(cache: Path, key: str) -> Iterator[None]:
    """Hold the place of an entry; a cache that cannot be written is one clear line."""
    folder = cache / "known"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{key}.lock")
        lock.acquire()
    except OSError as error:
        raise DataError(
            f"the cache '{printable(cache)}' cannot be written ({error.strerror or error}): "
            "set VICINAL_CACHE to a folder that can"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _make(
    files: Sequence[ImageFile], how: Decoding, folder: Path, skip_bad: bool, progress: Progress | None
) -> _Entry:
    """Return the entry after decoding every file into a place aside and moving it to its own."""
    shutil.rmtree(folder, ignore_errors=True)
    # Only the holder of the lock writes here, so what lies here already was left by a killed process.
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        _write(part, files, how, skip_bad, progress)
        part.replace(folder)
    except OSError as error:
        raise DataError(
            f"the cache '{printable(folder.parent)}' cannot be written ({error.strerror or error}): "
            "set VICINAL_CACHE to a folder that can"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    entry = _open(folder)
    if entry is None:
        raise DataError(f"the cache '{printable(folder)}' was damaged while it was written: try again")
    return entry


def _write(
    folder: Path, files: Sequence[ImageFile], how: Decoding, skip_bad: bool, progress: Progress | None
) -> None:
    """Decode into a folder, image after image, in memory that does not grow."""
    folder.mkdir(parents=True)
    _require_room(folder, len(files), how)
    bad: list[tuple[int, str]] = []
    checksum = 0
    with (folder / "images.u8").open("wb") as out, closing(decode_in_order(files, how)) as results:
        for position, result in enumerate(results):
            if isinstance(result, Tensor):
                row = result.numpy().tobytes()
                checksum = zlib.crc32(row, checksum)
                out.write(row)
            else:
                why = tolerated(result, skip_bad)
                bad.append((position, why.removeprefix(f"{printable(files[position].shown)}: ")))
            if progress is not None:
                progress(position + 1, len(files))
        out.flush()
        os.fsync(out.fileno())
    meta = {"shape": [len(files) - len(bad), *how.shape], "bad": bad, "crc32": checksum}
    written = (folder / "images.u8").stat().st_mtime_ns
    _write_json(folder / "meta.json", {**meta, "written": written})


def _require_room(folder: Path, count: int, how: Decoding) -> None:
    needed, free = count * how.channels * how.size**2, shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise DataError(
            f"the decoded images need {needed / 1e9:.1f} GB and '{printable(folder.parent)}' has "
            f"{free / 1e9:.1f} GB free: set VICINAL_CACHE to a larger disk"
        )


def _open_known(note: Path, cache: Path) -> _Entry | None:
    """Return the images that files of this stamp were decoded to, if they are still there and sound."""
    key = _read_json(note).get("key")
    return _open(cache / key) if isinstance(key, str) and key else None


def _open(folder: Path) -> _Entry | None:
    """Return a decoded set, memory-mapped; None if it is missing or damaged."""
    meta, path = _read_json(folder / "meta.json"), folder / "images.u8"
    try:
        shape, bad = tuple(meta["shape"]), tuple((int(k), str(why)) for k, why in meta["bad"])
        status = path.stat()
        if status.st_size != int(np.prod(shape)) or not _unchanged(path, status, meta):
            return None
        return _Entry(_mapped(path, shape), bad)
    except (KeyError, TypeError, ValueError, OSError):
        return None


def _unchanged(path: Path, status: os.stat_result, meta: dict[str, Any]) -> bool:
    """Return whether a file is what was written; one touched since is read through once to see."""
    if status.st_mtime_ns == meta["written"]:
        return True
    if _crc32(path) != meta["crc32"]:
        return False
    with contextlib.suppress(OSError):  # a cache that may only be read is checked every time
        _write_json(path.parent / "meta.json", {**meta, "written": status.st_mtime_ns})
    return True


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _mapped(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Return a file as a tensor that must not be written to."""
    if 0 in shape:
        return torch.empty(shape, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns; nothing here writes to images.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r", shape=shape))


def _stamp(files: Sequence[ImageFile], how: Decoding) -> str:
    """Return a digest of where the files lie and of their sizes and times, without reading them."""
    digest = blake2b(_header(how), digest_size=20)
    status = functools.cache(_status)  # thousands of images may lie in one archive
    for file in files:
        line = f"{file.path}\0{file.start}\0{file.length}\0{status(file.path)}\n"
        digest.update(os.fsencode(line))
    return digest.hexdigest()


def _status(path: str) -> str:
    try:
        found = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):
        return "missing"
    return f"{found.st_size} {found.st_mtime_ns}"


def _content_key(files: Sequence[ImageFile], how: Decoding) -> tuple[str, bool]:
    """Return a digest of the bytes of all files and of how they are decoded; and whether all can be read."""
    digest, readable = blake2b(_header(how), digest_size=20), True
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as executor:
        for one in executor.map(_file_digest, files):
            digest.update(one)
            readable = readable and one != UNREADABLE
    return digest.hexdigest(), readable


def _file_digest(file: ImageFile) -> bytes:
    try:
        return blake2b(file.read(), digest_size=20).digest()
    except (OSError, ValueError, zlib.error):
        return UNREADABLE  # what is wrong with it is said when it is decoded


def _header(how: Decoding) -> bytes:
    return json.dumps({"version": VERSION, **asdict(how)}, sort_keys=True).encode()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(values), encoding="utf-8")
    part.replace(path)
