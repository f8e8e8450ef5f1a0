"""Where images lie: folders, and archives read as if they were unpacked."""

import os
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from PIL import Image

from vicinal.errors import DataError

# Pillow knows these by their first bytes, but hands them to another program or cannot decode them at all.
NOT_DECODED = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"})
# Left behind by archives made on macOS, full of files that only look like images.
LITTER = frozenset({"__MACOSX"})
# Compressed tars have no way in but from the start: they must be unpacked.
ARCHIVE_SUFFIXES = frozenset({".tar", ".zip"})
ZIP_HEADER = struct.Struct("<26xHH")  # the lengths of name and extra field, which the data follow

Image.init()
FORMATS = tuple(name for name in Image.ID if name not in NOT_DECODED)
IMAGE_SUFFIXES = frozenset(
    suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS
)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """One image: a file, or a stretch of an archive. `name` is its path below the data's root.

    Paths are text, not `Path`: data sets have half a million of these.
    """

    name: str
    path: str
    start: int = 0  # of the stretch; for zip, of the member's header
    length: int | None = None  # None: the whole file
    packing: str = ""  # "", "stored" or "deflated": how a zip member lies there

    @property
    def shown(self) -> str:
        """The name that messages use."""
        return self.path if self.length is None else f"{self.path}:{self.name}"

    def read(self) -> bytes:
        """Return the bytes of the image file."""
        with open(self.path, "rb") as file:  # noqa: PTH123
            if self.length is None:
                return file.read()
            file.seek(self.start)
            if self.packing:
                file.seek(sum(ZIP_HEADER.unpack(file.read(ZIP_HEADER.size))), os.SEEK_CUR)
            packed = file.read(self.length)
        return zlib.decompress(packed, wbits=-zlib.MAX_WBITS) if self.packing == "deflated" else packed


def plain_file(path: Path, root: Path | None = None) -> ImageFile:
    """Return a file on disk, named by its path below the root."""
    name = path if root is None else path.relative_to(root)
    return ImageFile(name.as_posix(), os.fspath(path))


def is_image_name(name: str) -> bool:
    """Return whether a path names an image, and neither it nor a folder above it is hidden or litter."""
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") or part in LITTER for part in path.parts)
    return path.suffix.lower() in IMAGE_SUFFIXES and not hidden


def list_archive(archive: Path) -> list[ImageFile]:
    """Return the images in a .tar or .zip, where they can be read without unpacking it."""
    try:
        return list(_zip_members(archive) if zipfile.is_zipfile(archive) else _tar_members(archive))
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, KeyError, zlib.error) as error:
        raise DataError(
            f"'{printable(archive)}' cannot be read as an archive ({error}): get it anew"
        ) from error


def _tar_members(archive: Path) -> Iterator[ImageFile]:
    path = os.fspath(archive)
    with tarfile.open(archive, "r:") as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            # A file that tar has seen before under another name is stored as a link to it.
            data = tar.getmember(member.linkname) if member.islnk() else member
            if data.isreg() and is_image_name(name):
                yield ImageFile(name, path, data.offset_data, data.size)


def _zip_members(archive: Path) -> Iterator[ImageFile]:
    path, packings = os.fspath(archive), {zipfile.ZIP_STORED: "stored", zipfile.ZIP_DEFLATED: "deflated"}
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            if not is_image_name(member.filename):
                continue
            if member.compress_type not in packings or member.flag_bits & 1:
                raise zipfile.BadZipFile(f"{member.filename} is encrypted or packed in an uncommon way")
            packing = packings[member.compress_type]
            yield ImageFile(member.filename, path, member.header_offset, member.compress_size, packing)


def list_tree(root: Path) -> list[ImageFile]:
    """Return all images below a folder and in the archives that lie directly in it, named from the folder.

    An unpacked file wins over a member of the same name.
    """
    files = [plain_file(path, root) for path in walk(root)]
    have = {file.name for file in files}
    for archive in visible(root):
        if archive.suffix.lower() in ARCHIVE_SUFFIXES and archive.is_file():
            files += [file for file in list_archive(archive) if file.name not in have]
            have = {file.name for file in files}
    return files


def list_images(folder: Path) -> list[Path]:
    """Return all image files below the folder in natural order; hidden ones are skipped, links followed."""
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"'{printable(folder)}' {problem}: give a folder of images")
    found = sorted(walk(folder), key=lambda path: natural_key(path.relative_to(folder).as_posix()))
    if not found:
        others = list(strangers(folder))
        but = f", but {len(others)} other files, as {printable(others[0].name)}" if others else ""
        raise DataError(f"'{printable(folder)}' holds no images{but}: put files such as .jpg or .png there")
    return found


def walk(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the image files below a folder, not entering one that is its own ancestor through a link."""
    real = folder.resolve()
    if real in above:
        return
    for entry in visible(folder):
        # By suffix first: it spares a look at the disk for each of a hundred thousand images.
        if entry.suffix.lower() in IMAGE_SUFFIXES and not entry.is_dir():
            # A dangling link is kept, so that it is reported as a bad image and not silently missing.
            if entry.is_file() or not entry.exists():
                yield entry
        elif entry.is_dir():
            yield from walk(entry, (*above, real))


def strangers(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the visible files below a folder that have not the suffix of an image."""
    real = folder.resolve()
    if real in above:
        return
    for entry in visible(folder):
        if entry.is_dir():
            yield from strangers(entry, (*above, real))
        elif entry.suffix.lower() not in IMAGE_SUFFIXES and entry.is_file():
            yield entry


def visible(folder: Path) -> list[Path]:
    """Return what the folder holds, in natural order, without hidden entries."""
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        raise DataError(f"'{printable(folder)}' cannot be listed: {error.strerror}") from error
    shown = (entry for entry in entries if not entry.name.startswith(".") and entry.name not in LITTER)
    return sorted(shown, key=lambda entry: natural_key(entry.name))


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Return a sorting key by which 'a2' comes before 'a10', and upper and lower case side by side."""
    parts = re.split(r"(\d+)", name.casefold())
    return tuple(int(part) if part.isdecimal() else part for part in parts), name


def printable(path: Path | str) -> str:
    """Return the path as text that any UTF-8 output can take, whatever bytes the name holds."""
    text = path if isinstance(path, str) else path.as_posix()
    return os.fsencode(text).decode("utf-8", errors="replace")
