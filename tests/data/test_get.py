import functools
import io
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vicinal.data.catalog import DATASETS
from vicinal.data.download import Download
from vicinal.data.entries import DatasetEntry
from vicinal.data.find import status
from vicinal.data.get import get_dataset
from vicinal.errors import DataError

Trees = Any  # of conftest.py
PAGE = b"<!doctype html><html><body>Please sign in</body></html>"


class Site:
    """A folder on a web server on 127.0.0.1, and the paths that were asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()
        asked = self.asked

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                super().do_GET()

            def log_message(self, format: str, *args: object) -> None:
                pass

        folder.mkdir()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    site = Site(tmp_path / "site")
    yield site
    site.server.shutdown()
    site.server.server_close()


def zipped(files: dict[str, bytes]) -> bytes:
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as pack:
        for name, content in files.items():
            pack.writestr(name, content)
    return body.getvalue()


@pytest.fixture
def pacs(trees: Trees, site: Site) -> Callable[..., DatasetEntry]:
    """Return a maker of a small PACS with these mirrors; `good.zip` on the site is Dassl's archive of it."""
    entry = DATASETS["pacs"]
    lists = trees.lists(site.folder / "l", entry, {"train": [10], "crossval": [2], "test": [2, 10]}, first=1)
    named = {f"pacs/splits/{path.name}": path.read_bytes() for path in lists.iterdir()}
    (site.folder / "good.zip").write_bytes(zipped(trees.files(entry, prefix="pacs/images/") | named))
    (site.folder / "page.zip").write_bytes(PAGE)

    def make(*mirrors: str) -> DatasetEntry:
        urls = tuple(mirror if "://" in mirror else f"{site.url}/{mirror}" for mirror in mirrors)
        counts = dict.fromkeys(entry.domains, 14)
        downloads = (Download("pacs.zip", urls, unpack=True),)
        return replace(entry, counts=counts, class_counts={}, downloads=downloads)

    return make


def test_a_good_archive_is_fetched_unpacked_and_found(
    pacs: Callable[..., DatasetEntry], trees: Trees, site: Site, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int | None]] = []
    entry = pacs("good.zip")
    root = get_dataset(entry, tmp_path / "data", lambda *done: seen.append(done))
    assert root == tmp_path / "data" / "PACS"
    found = status(entry, [tmp_path / "data"])
    assert (found.state, found.split) == ("found", "official lists")
    assert not (root / "pacs.zip").exists()
    assert {name for name, _, _ in seen} == {"pacs.zip"}
    trees.check(trees.load("pacs", tmp_path / "data"), DATASETS["pacs"])
    assert site.asked == ["/good.zip"]


def test_a_second_run_fetches_nothing(pacs: Callable[..., DatasetEntry], site: Site, tmp_path: Path) -> None:
    entry = pacs("good.zip")
    get_dataset(entry, tmp_path / "data")
    assert get_dataset(entry, tmp_path / "data") is None
    assert site.asked == ["/good.zip"]


def test_a_failing_mirror_and_a_web_page_are_passed_over(
    pacs: Callable[..., DatasetEntry], site: Site, tmp_path: Path
) -> None:
    entry = pacs("gone.zip", "page.zip", "good.zip")
    assert get_dataset(entry, tmp_path / "data") is not None
    assert site.asked == ["/gone.zip", "/page.zip", "/good.zip"]
    assert status(entry, [tmp_path / "data"]).state == "found"


def test_a_web_page_is_no_archive(pacs: Callable[..., DatasetEntry], tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        get_dataset(pacs("page.zip"), tmp_path / "data")
    line = str(caught.value)
    assert "\n" not in line
    assert "page.zip: a web page instead of the file" in line
    assert not list((tmp_path / "data").rglob("*.zip"))


def test_offline_it_says_what_to_put_where(
    pacs: Callable[..., DatasetEntry], site: Site, tmp_path: Path
) -> None:
    site.server.shutdown()
    site.server.server_close()
    with pytest.raises(DataError) as caught:
        get_dataset(pacs("good.zip"), tmp_path / "data")
    line = str(caught.value)
    assert "\n" not in line
    assert "no connection (" in line
    root = tmp_path / "data" / "PACS"
    assert f"download pacs.zip by hand from {site.url}/good.zip and put it into {root}, then run" in line
    assert "`vicinal data get pacs` again or `vicinal data check pacs`" in line


def test_what_was_put_there_by_hand_is_taken(
    pacs: Callable[..., DatasetEntry], site: Site, tmp_path: Path
) -> None:
    root = tmp_path / "data" / "PACS"
    root.mkdir(parents=True)
    (root / "pacs.zip").write_bytes((site.folder / "good.zip").read_bytes())
    entry = pacs("good.zip")
    # Read where it lies: there is nothing to get.
    assert get_dataset(entry, tmp_path / "data") is None
    assert site.asked == []


def test_archives_stay_until_all_are_there(
    pacs: Callable[..., DatasetEntry], trees: Trees, site: Site, tmp_path: Path
) -> None:
    files = trees.files(DATASETS["pacs"])
    for domain in ("photo", "sketch"):
        part = {name: data for name, data in files.items() if name.startswith(domain)}
        (site.folder / f"{domain}.zip").write_bytes(zipped(part))
    entry = replace(
        pacs("good.zip"),
        downloads=tuple(
            Download(f"{name}.zip", (f"{site.url}/{name}.zip",), unpack=True)
            for name in ("photo", "sketch", "gone")
        ),
    )
    for _ in range(2):
        with pytest.raises(DataError, match=r"gone\.zip could not be downloaded .*HTTP 404"):
            get_dataset(entry, tmp_path / "data")
    assert site.asked == ["/photo.zip", "/sketch.zip", "/gone.zip", "/gone.zip"]


def test_files_below_the_folder_and_plain_ones(site: Site, tmp_path: Path, trees: Trees) -> None:
    entry = DATASETS["domainnet"]
    (site.folder / "clipart.zip").write_bytes(zipped({"clipart/airplane/1.png": trees.pixel()}))
    (site.folder / "clipart_train.txt").write_text("clipart/airplane/1.png 1\n")
    small = replace(
        entry,
        downloads=(
            Download("clipart.zip", (f"{site.url}/clipart.zip",), unpack=True),
            Download("clipart_train.txt", (f"{site.url}/clipart_train.txt",), folder="splits"),
        ),
    )
    root = get_dataset(small, tmp_path / "data")
    assert root == tmp_path / "data" / "domain_net"
    kept = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    assert [name for name in kept if not name.startswith(".")] == [
        "clipart/airplane/1.png",
        "splits/clipart_train.txt",
    ]


def test_what_needs_no_getting_and_what_has_no_address(tmp_path: Path) -> None:
    assert get_dataset(DATASETS["digits"], tmp_path) is None
    with pytest.raises(
        DataError, match=r"pacs has no address to fetch it from: put the images into '.*PACS' as"
    ):
        get_dataset(replace(DATASETS["pacs"], downloads=()), tmp_path)


def test_a_set_one_image_short_after_its_download_is_not_fetched_again(
    pacs: Callable[..., DatasetEntry], site: Site, tmp_path: Path
) -> None:
    entry = pacs("good.zip")
    entry = replace(entry, counts={**entry.counts, "photo": 15})
    get_dataset(entry, tmp_path / "data")
    get_dataset(entry, tmp_path / "data")
    assert site.asked == ["/good.zip"]
