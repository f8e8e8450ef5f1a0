"""Small trees of images in which each picture's colour says where it belongs."""

import io
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vicinal.data.catalog import DATASETS
from vicinal.data.domains import DomainSet
from vicinal.data.entries import DatasetEntry
from vicinal.data.load import list_entry, load_dataset

MakeTree = Callable[..., Path]
# In this order on disk; natural order is 2, 10, 11.
NUMBERS = (10, 2, 11)
ARCHIVES = ("x.tar", "dotted.tar", "stored.zip", "deflated.zip")


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """Return a function that writes root/<domain>/<class>/<i>.png."""
    # Each image has one gray level of its own.

    def make(
        domains: Sequence[str] = ("a", "b"), classes: Sequence[str] = ("cat", "dog"), count: int = 3
    ) -> Path:
        root = tmp_path / "pets"
        level = 0
        for domain in domains:
            for label in classes:
                folder = root / domain / label
                folder.mkdir(parents=True)
                for position in range(count):
                    Image.fromarray(np.full((8, 8), level, dtype=np.uint8)).save(folder / f"{position}.png")
                    level += 1
        return root

    return make


@cache
def pixel(domain: int, label: int, number: int) -> bytes:
    """Return a PNG of one pixel whose colour is domain, label and number."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    colour = bytes([0, label % 256, label // 256 + 16 * domain, number])
    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(colour)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


class Trees:
    """Writes the images of a catalog entry as folders and archives, and checks what was loaded by colour."""

    archives = ARCHIVES

    @staticmethod
    def pixel(domain: int = 0, label: int = 0, number: int = 0) -> bytes:
        return pixel(domain, label, number)

    @staticmethod
    def files(
        entry: DatasetEntry,
        template: str = "{domain}/{label}/{file}",
        *,
        domains: Mapping[str, str] | None = None,
        classes: Mapping[str, str] | None = None,
        prefix: str = "",
        count: int = 2,
    ) -> dict[str, bytes]:
        """Return the images of every class by path; those of "train|test" are dealt out in turn."""
        files = {}
        for d, domain in enumerate(entry.domains):
            for label, name in enumerate(entry.classes):
                for k, number in enumerate(NUMBERS[:count]):
                    steps = [step.split("|")[k % (step.count("|") + 1)] for step in template.split("/")]
                    path = "/".join(steps).format(
                        domain=(domains or {}).get(domain, domain),
                        label=(classes or {}).get(name, name),
                        file=f"img{number}.png",
                    )
                    files[prefix + path] = pixel(d, label, number)
        return files

    @staticmethod
    def write(root: Path, files: Mapping[str, bytes]) -> Path:
        made: set[str] = set()
        for name, content in files.items():
            path = os.fspath(root / name)
            folder = os.path.dirname(path)  # noqa: PTH120
            if folder not in made:
                Path(folder).mkdir(parents=True, exist_ok=True)
                made.add(folder)
            Path(path).write_bytes(content)
        return root

    @staticmethod
    def archive(path: Path, files: Mapping[str, bytes], kind: str = "") -> Path:
        """Write an archive of that kind, its members in an order of their own."""
        kind = kind or path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        members = sorted(files.items(), key=lambda item: item[0][::-1])
        if kind.endswith(".tar"):
            write_tar(path, members, "./" if kind.startswith("dotted") else "")
        else:
            packing = zipfile.ZIP_DEFLATED if kind.startswith("deflated") else zipfile.ZIP_STORED
            write_zip(path, members, packing)
        return path

    @staticmethod
    def lists(folder: Path, entry: DatasetEntry, parts: Mapping[str, Sequence[int]], first: int = 0) -> Path:
        """Write official lists: of every class the images with these numbers belong to these parts."""
        folder.mkdir(parents=True, exist_ok=True)
        pattern = entry.source.split.lists.file  # type: ignore[union-attr]
        for domain in entry.domains:
            for part, numbers in parts.items():
                lines = [
                    f"{domain}/{name}/img{number}.png {label + first}"
                    for label, name in enumerate(entry.classes)
                    for number in numbers
                ]
                (folder / pattern.format(domain=domain, part=part)).write_text("\n".join(lines) + "\n")
        return folder

    @staticmethod
    def load(name: str, data: Path, **options: object) -> DomainSet:
        """Return a data set of pixels; the cache lies beside the data folder."""
        return load_dataset(name, 1, 3, data_dir=data, cache=data.parent / "cache", **options)  # type: ignore[arg-type]

    @staticmethod
    def listed(name: str, data: Path) -> dict[str, list[tuple[int, str, str, bytes]]]:
        """Return label, path, part and bytes of every image of every domain, in order."""
        listing = list_entry(DATASETS[name], [data])
        return {
            domain: [(item.label, item.file.name, item.part, item.file.read()) for item in listing.of(domain)]
            for domain in listing.domains
        }

    @staticmethod
    def check(data: DomainSet, entry: DatasetEntry, count: int = 2) -> None:
        """Raise unless every image is where its colour says, in order, one of each class to validate on."""
        assert (data.name, data.classes, tuple(data.domains)) == (entry.name, entry.classes, entry.domains)
        assert data.bad == ()
        classes = torch.arange(len(entry.classes))
        for position, domain in enumerate(data.domains.values()):
            red, green, blue = domain.images[:, :, 0, 0].long().unbind(1)
            assert domain.labels.tolist() == (red + 256 * (green % 16)).tolist()
            assert domain.labels.tolist() == classes.repeat_interleave(count).tolist()
            assert set((green // 16).tolist()) == {position}
            assert blue.tolist() == sorted(NUMBERS[:count]) * len(classes)
            assert [path.rsplit("/", 1)[-1] for path in domain.paths] == [
                f"img{n}.png" for n in blue.tolist()
            ]
            assert sorted([*domain.train.tolist(), *domain.val.tolist()]) == list(range(len(domain.labels)))
            assert domain.labels[domain.val].tolist() == classes.tolist()
            assert domain.test.tolist() == list(range(len(domain.labels)))

    @staticmethod
    def same(one: DomainSet, other: DomainSet) -> None:
        """Raise unless two sets are the very same: names, order, pixels, paths, parts, facts."""
        for field in ("name", "classes", "bad", "facts"):
            assert getattr(one, field) == getattr(other, field)
        assert list(one.domains) == list(other.domains)
        for name, domain in one.domains.items():
            twin = other.domains[name]
            assert domain.paths == twin.paths
            for field in ("images", "labels", "train", "val", "test"):
                assert torch.equal(getattr(domain, field), getattr(twin, field)), (name, field)


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], prefix: str) -> None:
    with tarfile.open(path, "w") as tar:
        if prefix:
            folder = tarfile.TarInfo("./")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
        for name, content in members:
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write_zip(path: Path, members: Iterable[tuple[str, bytes]], packing: int) -> None:
    with zipfile.ZipFile(path, "w", packing) as pack:
        for name, content in members:
            pack.writestr(name, content)


@pytest.fixture(scope="session")
def trees() -> Trees:
    """Return the writer and checker of small trees."""
    return Trees()
