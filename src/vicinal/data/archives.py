"""Archives -> folders: what a file is by its first bytes, and unpacking that ends whole or not at all."""

import lzma
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from gzip import BadGzipFile
from pathlib import Path, PurePosixPath

from filelock import FileLock

from vicinal.data.files import printable
from vicinal.errors import DataError

# Called with the file's name, the bytes done and the bytes in all, where known.
ByteProgress = Callable[[str, int, int | None], None]

HEAD_BYTES = 1024
TAR_BLOCK = 512
WEB_PAGE = "a web page instead of the file"
# Images hardly shrink in an archive. This is what they take unpacked, with some room for names and blocks.
UNPACKED_RATIO = 1.1
GZIP, ZIP = b"\x1f\x8b", (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
FIRST_BYTES: dict[str, bytes | tuple[bytes, ...]] = {
    ".zip": ZIP,
    ".gz": GZIP,
    ".tgz": GZIP,
    ".bz2": b"BZh",
    ".xz": b"\xfd7zXZ\x00",
    ".npy": b"\x93NUMPY",
    ".npz": ZIP,
}
PAGE_SUFFIXES = (".html", ".htm")
PAGE_STARTS = ("<!doctype html", "<html", "<head", "<body", "<title", "<script", "<meta")
DAMAGE = (zipfile.BadZipFile, tarfile.TarError, BadGzipFile, EOFError, zlib.error, lzma.LZMAError)


def wrong_kind(name: str, head: bytes, content_type: str = "") -> str | None:
    """Return why a file of this name cannot begin with `head`, or None where nothing speaks against it.

    `head` is the first `HEAD_BYTES` bytes, fewer only where the file is shorter.
    """
    suffix = PurePosixPath(name.lower()).suffix
    if not head:
        return "an empty file"
    if suffix in PAGE_SUFFIXES:
        return None
    begins = _begins_as(suffix, head)
    # Some servers call every file text/html: the type alone counts only where the bytes do not speak for it.
    if _is_page(head) or ("html" in content_type.lower() and not begins):
        return WEB_PAGE
    return f"not a {suffix} file by its first bytes" if begins is False else None


def _begins_as(suffix: str, head: bytes) -> bool | None:
    """Return whether the bytes begin a file of that suffix; None where its beginning is not fixed."""
    if suffix == ".tar":
        return _is_tar_header(head)
    return head.startswith(FIRST_BYTES[suffix]) if suffix in FIRST_BYTES else None


def _is_tar_header(head: bytes) -> bool:
    """Return whether the first block has the checksum of a tar header; old tars carry no other mark."""
    try:
        tarfile.TarInfo.frombuf(head[:TAR_BLOCK], "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def _is_page(head: bytes) -> bool:
    """Return whether the bytes begin an HTML page, in UTF-8 or UTF-16, after a byte order mark and blanks."""
    wide = head.startswith((b"\xff\xfe", b"\xfe\xff"))
    text = head.decode("utf-16" if wide else "utf-8-sig", errors="replace").lstrip().lower()
    prolog = text.startswith(("<?xml", "<!--")) and re.search(r"<(!doctype )?html", text) is not None
    return prolog or text.startswith(PAGE_STARTS)


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise unless the disk of the folder has the needed bytes free."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        found = f"{what} needs {readable_size(needed)}, '{printable(folder)}' has {readable_size(free)} free"
        raise DataError(f"{found}: free some disk space or choose another folder with --data-dir")


def readable_size(count: int) -> str:
    """Return the number of bytes as a person writes it, such as '1.5 GB'."""
    size = float(count)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def unpack(archive: Path, folder: Path, progress: ByteProgress | None = None) -> None:
    """Return once all members of the zip or tar archive lie below the folder; on an error none of them does.

    They are unpacked into a hidden folder there and moved into place at the end; what a killed run left in it
    is removed by the next one. Folders that exist are merged into, files replaced. A single compressed file
    such as 'labels.gz' is left as it is. Progress counts the bytes of the archive.
    """
    name = archive.name.lower()
    if name.endswith(".gz") and not name.endswith(".tar.gz"):
        return
    try:
        _require_archive(archive)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{archive.name}.lock"):
            _unpack_aside(archive, folder, folder / f".{archive.name}.unpacking", progress)
    except (*DAMAGE, NotImplementedError) as error:
        raise DataError(f"{_one_line(archive)}: {_damage(error)}: delete it and download it again") from error
    except OSError as error:
        why = f"cannot be unpacked into '{_one_line(folder)}' ({error.strerror or error})"
        raise DataError(f"{_one_line(archive)}: {why}: mend that and run again") from error


def _require_archive(archive: Path) -> None:
    """Raise unless the file can be read and is no web page."""
    with archive.open("rb") as file:
        fault = wrong_kind(archive.name, file.read(HEAD_BYTES))
    if fault is not None:
        raise DataError(f"{_one_line(archive)}: {fault}: delete it and download it again")


def _damage(error: Exception) -> str:
    """Return in one line what is wrong with the archive."""
    if isinstance(error, NotImplementedError):
        return f"it is packed in a way that cannot be read ({error})"
    # tarfile lists on further lines what each of its readers said.
    why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(":")
    return f"the archive is damaged, or not a zip or tar ({why})"


def _unpack_aside(archive: Path, folder: Path, aside: Path, progress: ByteProgress | None) -> None:
    """Unpack into the folder `aside`, which is gone at the end, and move what it holds into the folder."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        with archive.open("rb") as file:
            is_zip = file.read(len(ZIP[0])) in ZIP
        extract = _extract_zip if is_zip else _extract_tar
        extract(archive, aside, progress)
        _merge(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _merge(source: Path, target: Path) -> None:
    """Move all that `source` holds into `target`, entering only folders that exist there and are no links."""
    for entry in sorted(source.iterdir()):
        place = target / entry.name
        if _is_real_folder(entry) and _is_real_folder(place):
            _merge(entry, place)
        else:
            entry.replace(place)


def _is_real_folder(path: Path) -> bool:
    """Return whether the path is a folder and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _extract_zip(archive: Path, aside: Path, progress: ByteProgress | None) -> None:
    """Write the members of a zip into the folder."""
    with zipfile.ZipFile(archive) as pack:
        members = pack.infolist()
        places = [aside / _inside(archive, member.filename) for member in members]
        for member in members:
            _refuse_odd_member(archive, member)
        require_space(aside.parent, sum(member.file_size for member in members), f"unpacking {archive.name}")
        total, done = sum(member.compress_size for member in members), 0
        for member, place in zip(members, places, strict=True):
            # Some tools end the names of folders with a backslash.
            if member.filename.endswith(("/", "\\")):
                place.mkdir(parents=True, exist_ok=True)
            else:
                _copy_member(pack, member, place)
            done += member.compress_size
            if progress is not None:
                progress(archive.name, done, total)


def _copy_member(pack: zipfile.ZipFile, member: zipfile.ZipInfo, place: Path) -> None:
    """Write one member of a zip; its checksum is compared on the way."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with pack.open(member) as packed, place.open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)


def _refuse_odd_member(archive: Path, member: zipfile.ZipInfo) -> None:
    """Raise for an encrypted member, a link or a device: a zip of images needs none."""
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise _refusal(archive, member.filename, "is a link or a device")
    if member.flag_bits & 1:
        raise _refusal(archive, member.filename, "is encrypted")


def _extract_tar(archive: Path, aside: Path, progress: ByteProgress | None) -> None:
    """Write the members of a tar, compressed or not, into the folder."""
    if not hasattr(tarfile, "data_filter"):
        needs = "unpacking a tar safely needs Python 3.11.4 or later"
        raise DataError(f"{_one_line(archive)}: {needs}: update Python or unpack it by hand")
    total = archive.stat().st_size
    expected = total if archive.suffix.lower() == ".tar" else int(UNPACKED_RATIO * total)
    require_space(aside.parent, expected, f"unpacking {archive.name}")
    with archive.open("rb") as raw, tarfile.open(fileobj=raw, mode="r:*") as pack:
        while (member := pack.next()) is not None:
            _extract_tar_member(archive, pack, member, aside)
            if progress is not None:
                progress(archive.name, min(raw.tell(), total), total)
        _require_end(pack)


def _extract_tar_member(archive: Path, pack: tarfile.TarFile, member: tarfile.TarInfo, aside: Path) -> None:
    """Write one member of a tar, refusing what points out of the folder and what is no file or folder."""
    _inside(archive, member.name)
    try:
        pack.extract(member, aside, filter="data")
    except tarfile.SpecialFileError:
        raise _refusal(archive, member.name, "is a device") from None
    except tarfile.FilterError:
        raise _refusal(archive, member.name, "leads out of the folder") from None


def _require_end(pack: tarfile.TarFile) -> None:
    """Raise unless the tar ends with its block of zeros: tarfile takes a cut or spoilt header for the end."""
    assert pack.fileobj is not None
    pack.fileobj.seek(pack.offset)
    if pack.fileobj.read(TAR_BLOCK) != bytes(TAR_BLOCK):
        raise tarfile.ReadError("it ends too early")


def _inside(archive: Path, name: str) -> PurePosixPath:
    """Return the member's path below the folder; raise where it would lie outside."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", name):
        raise _refusal(archive, name, "leads out of the folder")
    return path


def _refusal(archive: Path, member: str, why: str) -> DataError:
    """Return the error for an archive that holds a member no honest one does."""
    return DataError(
        f"{_one_line(archive)}: refused, '{_one_line(Path(member))}' in it {why}: use another copy"
    )


def _one_line(path: Path) -> str:
    """Return the path as printable text without line breaks."""
    return "".join(mark if mark.isprintable() else "?" for mark in printable(path))
