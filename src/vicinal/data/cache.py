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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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

VERSION = 1  # part of every key: raise it when the same bytes would decode to other pixels
CHUNK = 1 << 22
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
    stamp = _stamp(files, how)
    note = cache / "known" / f"{stamp}.json"
    found = _open_known(note, cache)
    if found is None:
        _make_folder(note.parent)
        with FileLock(cache / "known" / f"{stamp}.lock"):
            # Another process may have made it while this one waited.
            found = _open_known(note, cache) or _make(files, how, cache, note, skip_bad, progress)
    if found.bad and not skip_bad:
        tolerated(DataError(found.bad[0]), skip_bad)
    return found


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache '{printable(folder.parent)}' cannot be written ({error.strerror}): "
            "set VICINAL_CACHE to a folder that can"
        ) from error


def _make(
    files: Sequence[ImageFile],
    how: Decoding,
    cache: Path,
    note: Path,
    skip_bad: bool,
    progress: Progress | None,
) -> Decoded:
    """Return the images of files never seen at these times: content that is known is not decoded again."""
    key = _content_key(files, how)
    folder = cache / key
    found = _open(folder)
    if found is None:
        shutil.rmtree(folder, ignore_errors=True)
        # Only the holder of the lock writes here, so what lies here already was left by a killed process.
        part = cache / f"{note.stem}.part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            _write(part, files, how, skip_bad, progress)
            # A twin of these files elsewhere has another lock and may have been quicker.
            with contextlib.suppress(OSError):
                part.replace(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        found = _open(folder)
        if found is None:
            raise DataError(f"the cache '{printable(folder)}' was damaged while it was written: try again")
    _write_json(note, {"key": key})
    return found


def _write(
    folder: Path, files: Sequence[ImageFile], how: Decoding, skip_bad: bool, progress: Progress | None
) -> None:
    """Decode into a folder, image after image, in memory that does not grow."""
    folder.mkdir(parents=True)
    _require_room(folder, len(files), how)
    kept: list[int] = []
    bad: list[str] = []
    checksum = 0
    with (folder / "images.u8").open("wb") as out, closing(decode_in_order(files, how)) as results:
        for position, result in enumerate(results):
            if isinstance(result, Tensor):
                row = result.numpy().tobytes()
                checksum = zlib.crc32(row, checksum)
                out.write(row)
                kept.append(position)
            else:
                bad.append(tolerated(result, skip_bad))
            if progress is not None:
                progress(position + 1, len(files))
        out.flush()
        os.fsync(out.fileno())
    gone = sorted(set(range(len(files))) - set(kept))
    meta = {"shape": [len(kept), *how.shape], "files": len(files), "gone": gone, "bad": bad}
    written = (folder / "images.u8").stat().st_mtime_ns
    _write_json(folder / "meta.json", {**meta, "crc32": checksum, "written": written})


def _require_room(folder: Path, count: int, how: Decoding) -> None:
    needed, free = count * how.channels * how.size**2, shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise DataError(
            f"the decoded images need {needed / 1e9:.1f} GB and '{printable(folder.parent)}' has "
            f"{free / 1e9:.1f} GB free: set VICINAL_CACHE to a larger disk"
        )


def _open_known(note: Path, cache: Path) -> Decoded | None:
    """Return the images that files of this stamp were decoded to, if they are still there and sound."""
    key = _read_json(note).get("key")
    return _open(cache / key) if isinstance(key, str) and key else None


def _open(folder: Path) -> Decoded | None:
    """Return a decoded set, memory-mapped; None if it is missing or damaged."""
    meta, path = _read_json(folder / "meta.json"), folder / "images.u8"
    try:
        shape, gone = tuple(meta["shape"]), set(meta["gone"])
        status = path.stat()
        if status.st_size != int(np.prod(shape)) or not _unchanged(path, status, meta):
            return None
        kept = tuple(position for position in range(meta["files"]) if position not in gone)
        return Decoded(_mapped(path, shape), kept, tuple(meta["bad"]))
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
    except OSError:
        return "missing"
    return f"{found.st_size} {found.st_mtime_ns}"


def _content_key(files: Sequence[ImageFile], how: Decoding) -> str:
    """Return a digest of the bytes of all files, in order, and of how they are decoded."""
    digest = blake2b(_header(how), digest_size=20)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as executor:
        for one in executor.map(_file_digest, files):
            digest.update(one)
    return digest.hexdigest()


def _file_digest(file: ImageFile) -> bytes:
    try:
        return blake2b(file.read(), digest_size=20).digest()
    except (OSError, zlib.error):
        return b"unreadable"  # what is wrong with it is said when it is decoded


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
