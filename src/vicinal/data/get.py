"""A named data set from the network into a data folder."""

from pathlib import Path

from vicinal.data.archives import ByteProgress, unpack
from vicinal.data.download import fetch
from vicinal.data.entries import BuiltIn, DatasetEntry
from vicinal.data.find import how_to_get, status
from vicinal.errors import DataError


def get_dataset(entry: DatasetEntry, directory: Path, progress: ByteProgress | None = None) -> Path | None:
    """Return the folder a data set was put into; None if it needs no getting.

    What is already there is not fetched again.
    """
    source = entry.source
    if isinstance(source, BuiltIn) or status(entry, [directory]).state == "found":
        return None
    if not entry.downloads:
        raise DataError(f"{entry.name} has no address to fetch it from: {how_to_get(entry, directory)}")
    root = directory / source.folders[0]
    archives = []
    for download in entry.downloads:
        file = fetch(download, root, name=entry.name, progress=progress)
        if download.unpack:
            unpack(file, file.parent, progress)
            archives.append(file)
    # Only when all are there: until then an archive is what keeps it from being fetched again.
    for archive in archives:
        archive.unlink(missing_ok=True)
    return root
