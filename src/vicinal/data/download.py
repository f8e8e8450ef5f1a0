"""Addresses -> files on disk: mirrors, resume, checksums; a web page is never taken for the file."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from filelock import FileLock

from vicinal.data.archives import HEAD_BYTES, UNPACKED_RATIO, ByteProgress, require_space, wrong_kind
from vicinal.data.connection import MirrorError, Reply, connect, is_address, page_of
from vicinal.data.files import printable
from vicinal.errors import ConfigError, DataError

__all__ = ["ByteProgress", "Download", "fault", "fetch"]

# Seconds to wait before each further try of one mirror.
PAUSES = (1.0, 3.0, 9.0)
# A connection that broke but brought this much starts the count of tries anew: long downloads break often.
WORTH_GOING_ON = 1 << 20
DIGESTS: dict[str, Callable[[], "hashlib._Hash"]] = {
    "md5": partial(hashlib.md5, usedforsecurity=False),
    "sha256": hashlib.sha256,
}


@dataclass(frozen=True)
class Download:
    """One file to fetch: its mirrors, tried in order, and what is known of it.

    An address is http(s) or 'gdrive:<id>'. `folder` is the place below the data set's folder. `unpack` asks
    the caller to unpack it there afterwards; fetching only keeps the disk space free for it.
    """

    file: str
    urls: tuple[str, ...]
    size: int | None = None
    md5: str | None = None
    sha256: str | None = None
    unpack: bool = False
    folder: str = ""

    def __post_init__(self) -> None:
        below = PurePosixPath(self.folder)
        if self.file in ("", ".", "..") or re.search(r"[/\\]", self.file):
            raise ConfigError(f"'{self.file}' is not the name of a file: give it without folders")
        if below.is_absolute() or ".." in below.parts:
            raise ConfigError(f"'{self.folder}' is not a folder below the data set's: give a relative one")
        for url in self.urls:
            if not is_address(url):
                raise ConfigError(f"'{url}' cannot be downloaded from: give http(s)://... or gdrive:<id>")
        if self.size is not None and self.size < 1:
            raise ConfigError(f"{self.file}: size must be at least 1 byte, or None where it is not known")
        for kind, digits in (("md5", 32), ("sha256", 64)):
            if re.fullmatch(rf"[0-9a-f]{{{digits}}}", getattr(self, kind) or "0" * digits) is None:
                raise ConfigError(f"{self.file}: {kind} takes {digits} lower-case hexadecimal digits")


@dataclass(frozen=True)
class _Note:
    """Where the bytes of the partial file are from; `validator` is the server's name for this version."""

    url: str = ""
    validator: str | None = None
    total: int | None = None


@dataclass(frozen=True)
class _Transfer:
    """What all tries of one download share."""

    download: Download
    part: Path
    note: Path
    progress: ByteProgress | None
    timeout: float
    pauses: Sequence[float]


def fetch(
    download: Download,
    folder: Path,
    *,
    name: str = "NAME",
    progress: ByteProgress | None = None,
    timeout: float = 30.0,
    pauses: Sequence[float] = PAUSES,
) -> Path:
    """Return the path of the whole file, folder/download.folder/download.file, downloaded unless it is there.

    What has arrived lies in '<file>.part' until it is whole and checked; an interrupted download goes on from
    there. `name` is the data set as the user calls it, `timeout` the longest silence of a server in seconds,
    `pauses` the seconds before each further try of one mirror.
    """
    place = folder / download.folder / download.file
    try:
        # Before the lock, so that a finished file is also found in a folder that cannot be written.
        if place.is_file() and fault(place, download) is None:
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        part, note = (place.with_name(place.name + ending) for ending in (".part", ".part.json"))
        with FileLock(place.with_name(place.name + ".lock")) as lock:
            failures = _bring(_Transfer(download, part, note, progress, timeout, pauses), place)
            if not failures:
                # Whoever still waits on the removed lock finds the file finished.
                with suppress(OSError):
                    Path(lock.lock_file).unlink()
                return place
    except OSError as error:
        where = f"'{printable(place)}' cannot be read or written ({error.strerror or error})"
        raise DataError(f"{where}: mend that or choose another folder with --data-dir") from error
    raise DataError(_by_hand(download, place.parent, failures, name))


def fault(path: Path, download: Download) -> str | None:
    """Return what is wrong with the file by all that is known of it, or None."""
    with path.open("rb") as file:
        kind = wrong_kind(download.file, file.read(HEAD_BYTES))
    size = path.stat().st_size
    if kind is not None:
        return kind
    if download.size is not None and size != download.size:
        return f"{size:,} bytes instead of {download.size:,}"
    for algorithm, start in DIGESTS.items():
        expected: str | None = getattr(download, algorithm)
        if expected is None:
            continue
        with path.open("rb") as file:
            found = hashlib.file_digest(file, start).hexdigest()
        if found != expected:
            return f"a wrong checksum ({algorithm} {found} instead of {expected})"
    return None


def _bring(transfer: _Transfer, place: Path) -> list[str]:
    """Return nothing once the file is in place, or one reason for each mirror that could not deliver it."""
    failures = []
    if place.is_file():
        wrong = fault(place, transfer.download)
        if wrong is None:
            return []
        failures.append(f"the one already there: {wrong}")
    for url in transfer.download.urls:
        try:
            _from_mirror(transfer, url)
        except MirrorError as failure:
            failures.append(f"{page_of(url)}: {failure}")
        else:
            transfer.part.replace(place)
            transfer.note.unlink(missing_ok=True)
            return []
    return failures or ["no address is known"]


def _by_hand(download: Download, folder: Path, failures: list[str], name: str) -> str:
    """Return the line that says why there is no file and what to put where."""
    source = f" from {page_of(download.urls[0])}" if download.urls else ""
    advice = f"download {download.file} by hand{source} and put it into {printable(folder)}"
    then = f"then run `vicinal data get {name}` again or `vicinal data check {name}`"
    return f"{download.file} could not be downloaded ({'; '.join(failures)}): {advice}, {then}"


def _from_mirror(transfer: _Transfer, url: str) -> None:
    """Return once the partial file is whole and right; a wrong one is removed."""
    for last in (False, True):
        continued = _with_retries(transfer, url)
        wrong = fault(transfer.part, transfer.download)
        if wrong is None:
            return
        transfer.part.unlink()
        # Pieces of two versions may have met in a file that was continued: it gets one try from byte 0.
        if last or not continued:
            raise MirrorError(f"{wrong}; removed")


def _with_retries(transfer: _Transfer, url: str) -> bool:
    """Return, once all bytes have arrived, whether they continue what an earlier try had left."""
    tried, best = 0, _size(transfer.part)
    while True:
        try:
            return _attempt(transfer, url)
        except MirrorError as failure:
            if failure.restart:
                transfer.part.unlink(missing_ok=True)
            if _size(transfer.part) >= best + WORTH_GOING_ON:
                tried, best = 0, _size(transfer.part)
            if not failure.again or tried >= len(transfer.pauses):
                raise
            time.sleep(transfer.pauses[tried])
            tried += 1


def _attempt(transfer: _Transfer, url: str) -> bool:
    """Return, once one connection has brought all that was missing, whether an earlier one brought some."""
    note = _read_note(transfer.note)
    have, validator = _continue_from(transfer, url, note)
    whole = transfer.download.size or (note.total if note.url == url else None)
    if have and have == whole:
        return True
    with connect(url, transfer.download.file, have, validator, transfer.timeout) as reply:
        _require_fit(transfer, reply)
        if reply.start == 0:
            # In this order, so that a kill in between never leaves a note beside bytes it does not speak of.
            transfer.part.unlink(missing_ok=True)
            transfer.note.write_text(json.dumps(asdict(_Note(url, reply.validator, reply.total))))
        _store(transfer, reply)
        return reply.start > 0


def _require_fit(transfer: _Transfer, reply: Reply) -> None:
    """Raise where the server's file is not of the known size, or the disk has no room for it."""
    download, known = transfer.download, transfer.download.size
    if known is not None and reply.total is not None and known != reply.total:
        raise MirrorError(f"{reply.total:,} bytes instead of {known:,}")
    whole = known or reply.total
    if whole is not None:
        unpacked = int(UNPACKED_RATIO * whole) if download.unpack else 0
        what = "downloading and unpacking" if download.unpack else "downloading"
        require_space(transfer.part.parent, whole - reply.start + unpacked, f"{what} {download.file}")


def _store(transfer: _Transfer, reply: Reply) -> None:
    """Append all that the server sends to the partial file."""
    file, known = transfer.download.file, transfer.download.size
    done, whole = reply.start, known or reply.total
    with transfer.part.open("ab") as out:
        for piece in reply.pieces:
            done += len(piece)
            if known is not None and done > known:
                raise MirrorError(f"more than {known:,} bytes", restart=True)
            out.write(piece)
            if transfer.progress is not None:
                transfer.progress(file, done, whole)
    # Without a length of its own a reply that broke looks like one that ended.
    if whole is not None and done < whole:
        raise MirrorError("the connection broke during the download", again=True)


def _continue_from(transfer: _Transfer, url: str, note: _Note) -> tuple[int, str | None]:
    """Return how many bytes of the partial file may be kept, and the version the server must still have.

    Bytes from another mirror, or of a version the server did not name, are kept only where a checksum will
    judge the whole.
    """
    have, known = _size(transfer.part), transfer.download
    if known.size is not None and have > known.size:
        return 0, None
    if note.url == url and note.validator is not None:
        return have, note.validator
    return (have if known.md5 or known.sha256 else 0), None


def _read_note(path: Path) -> _Note:
    """Return what is noted beside the partial file, or an empty note where that cannot be read."""
    try:
        return _Note(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return _Note()


def _size(path: Path) -> int:
    """Return the size of the file, 0 where there is none."""
    return path.stat().st_size if path.is_file() else 0
