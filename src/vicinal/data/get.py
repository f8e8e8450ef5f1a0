"""A named data set from the network into a data folder."""

from collections.abc import Sequence
from pathlib import Path

from vicinal.data.archives import ByteProgress, unpack
from vicinal.data.download import fetch
from vicinal.data.entries import BuiltIn, DatasetEntry
from vicinal.data.find import how_to_get, status
from vicinal.errors import DataError

# Remembers what was fetched and unpacked, for the archives themselves are removed.
FETCHED = ".fetched"


def get_dataset(
    entry: DatasetEntry,
    directory: Path,
    progress: ByteProgress | None = None,
    others: Sequence[Path] = (),
) -> Path | None:
    """Return the folder a data set was put into; None if there is nothing left to get.

    `others` are further data folders it may already lie in. What was fetched once is not fetched again.
    """
    source = entry.source
    if isinstance(source, BuiltIn) or status(entry, [directory, *others]).state == "found":
        return None
    if not entry.downloads:
        raise DataError(f"{entry.name} has no address to fetch it from: {how_to_get(entry, directory)}")
    root = directory / source.folders[0]
    note = root / FETCHED
    fetched = set(note.read_text(encoding="utf-8").split("\n")) if note.exists() else set()
    missing = [download for download in entry.downloads if download.file not in fetched]
    if not missing:
        return None
    archives = []
    for download in missing:
        file = fetch(download, root, name=entry.name, progress=progress)
        if download.unpack:
            unpack(file, file.parent, progress)
            archives.append(file)
    # Only when all are there: until then an archive is what keeps it from being fetched again.
    for archive in archives:
        archive.unlink(missing_ok=True)
    note.write_text("\n".join(sorted({*fetched, *(d.file for d in missing)} - {""})), encoding="utf-8")
    return root
