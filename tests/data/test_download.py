import hashlib
import io
import json
import os
import shutil
import socket
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from vicinal.data import connection, download
from vicinal.data.download import Download, fetch
from vicinal.errors import ConfigError, DataError

NOISE = bytes(range(256)) * 40 + os.urandom(200_000)
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Please sign in</body></html>"
QUOTA = b"<!DOCTYPE html><html><head><title>Google Drive - Quota exceeded</title></head></html>"
NO_PAUSE = (0.0, 0.0)
DROP = 50_000


@dataclass
class Page:
    """How the server answers for one path."""

    body: bytes
    kind: str = "application/octet-stream"
    tag: str | None = '"v1"'
    date: str | None = None
    ranges: bool = True
    length: bool = True
    chunked: bool = False
    status: int = 200
    location: str = ""
    claims: int | None = None  # a Content-Range that starts elsewhere
    drops: list[int] = field(default_factory=list)  # bytes of the body after which each next reply breaks
    silent: threading.Event | None = None  # waits for it after the first bytes


class Site:
    """A web server on 127.0.0.1 that answers as its pages say and keeps the requests."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                site.requests.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
                self.close_connection = True
                if self.path in site.pages:
                    answer(self, site.pages[self.path])
                else:
                    self.send_error(404)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def ranges(self) -> list[str | None]:
        return [headers.get("range") for _, headers in self.requests]


def answer(handler: BaseHTTPRequestHandler, page: Page) -> None:
    start = first_byte(handler, page)
    body = page.body[start:]
    handler.send_response(206 if start else page.status)
    if start:
        claimed = start if page.claims is None else page.claims
        handler.send_header("Content-Range", f"bytes {claimed}-{len(page.body) - 1}/{len(page.body)}")
    headers = {"ETag": page.tag, "Last-Modified": page.date, "Location": page.location or None}
    headers["Content-Type"] = page.kind
    headers["Transfer-Encoding"] = "chunked" if page.chunked else None
    headers["Content-Length"] = str(len(body)) if page.length and not page.chunked else None
    for key, value in headers.items():
        if value is not None:
            handler.send_header(key, value)
    handler.end_headers()
    cut = page.drops.pop(0) if page.drops else len(body)
    pieces = [body[:cut]] if cut else []
    for piece in pieces:
        handler.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if page.chunked else piece)
        handler.wfile.flush()
    if page.silent is not None:
        page.silent.wait(5)
    if page.chunked and cut >= len(body):
        handler.wfile.write(b"0\r\n\r\n")


def first_byte(handler: BaseHTTPRequestHandler, page: Page) -> int:
    """Return where the reply starts by the request's Range and If-Range."""
    asked = handler.headers.get("Range")
    if asked is None or not page.ranges or page.status != 200:
        return 0
    version = handler.headers.get("If-Range")
    if version is not None and version not in (page.tag, page.date):
        return 0
    return int(asked.removeprefix("bytes=").removesuffix("-"))


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    # Small pieces, so that a download can be interrupted half-way.
    monkeypatch.setattr(connection, "CHUNK", 1 << 14)
    site = Site()
    yield site
    site.server.shutdown()
    site.server.server_close()


def zipped(content: bytes = NOISE) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as pack:
        pack.writestr("photo/1.bin", content)
    return buffer.getvalue()


BODY = zipped()
SHA256 = hashlib.sha256(BODY).hexdigest()
MD5 = hashlib.md5(BODY).hexdigest()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def failure(wanted: Download, folder: Path, **options: float) -> str:
    """Return the one line with which it fails."""
    with pytest.raises(DataError) as caught:
        fetch(wanted, folder, name="pacs", pauses=NO_PAUSE, **options)
    line = str(caught.value)
    assert "\n" not in line
    return line


def interrupted(wanted: Download, folder: Path, after: int = DROP) -> int:
    """Interrupt a download once that many bytes have arrived; return how many lie in the partial file."""

    def stop(name: str, done: int, total: int | None) -> None:
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(wanted, folder, progress=stop)
    return (folder / f"{wanted.file}.part").stat().st_size


def test_a_file_arrives_whole_and_alone_with_progress(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY)
    wanted = Download("a.zip", (f"{site.url}/a.zip",), len(BODY), MD5, SHA256, folder="raw/below")
    seen: list[tuple[str, int, int | None]] = []
    path = fetch(wanted, tmp_path, progress=lambda *counts: seen.append(counts))
    assert path == tmp_path / "raw" / "below" / "a.zip"
    assert path.read_bytes() == BODY
    assert names(path.parent) == {"a.zip"}
    assert seen[-1] == ("a.zip", len(BODY), len(BODY))
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})


@pytest.mark.parametrize("known", [{}, {"size": len(BODY)}, {"md5": MD5}, {"sha256": SHA256}])
def test_a_finished_file_is_not_fetched_again(site: Site, tmp_path: Path, known: dict[str, str]) -> None:
    site.pages["/a.zip"] = Page(BODY)
    wanted = Download("a.zip", (f"{site.url}/a.zip",), **known)  # type: ignore[arg-type]
    (tmp_path / "a.zip").write_bytes(BODY)
    assert fetch(wanted, tmp_path) == tmp_path / "a.zip"
    assert site.requests == []
    assert names(tmp_path) == {"a.zip"}


def test_a_finished_file_is_found_in_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(BODY)
    tmp_path.chmod(0o500)
    try:
        assert fetch(Download("a.zip", (), sha256=SHA256), tmp_path).read_bytes() == BODY
    finally:
        tmp_path.chmod(0o700)


def test_a_wrong_file_that_is_there_is_replaced_only_by_a_right_one(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(PAGE)
    wanted = Download("a.zip", (f"{site.url}/a.zip",), sha256=SHA256)
    assert "the one already there: a web page instead of the file; http" in failure(wanted, tmp_path)
    assert (tmp_path / "a.zip").read_bytes() == PAGE
    site.pages["/a.zip"] = Page(BODY)
    assert fetch(wanted, tmp_path).read_bytes() == BODY


def test_an_interrupted_download_goes_on_where_it_was(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY)
    wanted = Download("a.zip", (f"{site.url}/a.zip",))
    have = interrupted(wanted, tmp_path)
    assert 0 < have < len(BODY)
    note = json.loads((tmp_path / "a.zip.part.json").read_text())
    assert (note["url"], note["validator"]) == (f"{site.url}/a.zip", '"v1"')
    seen: list[int] = []
    fetch(wanted, tmp_path, progress=lambda name, done, total: seen.append(done))
    assert (tmp_path / "a.zip").read_bytes() == BODY
    assert site.ranges() == [None, f"bytes={have}-"]
    assert site.requests[1][1]["if-range"] == '"v1"'
    assert min(seen) > have
    assert names(tmp_path) == {"a.zip"}


def test_a_file_changed_on_the_server_is_fetched_from_its_beginning(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(zipped(NOISE[::-1]))
    wanted = Download("a.zip", (f"{site.url}/a.zip",))
    interrupted(wanted, tmp_path)
    site.pages["/a.zip"] = Page(BODY, tag='"v2"')
    assert fetch(wanted, tmp_path).read_bytes() == BODY


def test_a_date_serves_where_the_tag_is_weak(site: Site, tmp_path: Path) -> None:
    date = "Mon, 06 Jul 2020 10:00:00 GMT"
    site.pages["/a.zip"] = Page(BODY, tag='W/"v1"', date=date)
    wanted = Download("a.zip", (f"{site.url}/a.zip",))
    have = interrupted(wanted, tmp_path)
    assert fetch(wanted, tmp_path).read_bytes() == BODY
    assert site.ranges() == [None, f"bytes={have}-"]
    assert site.requests[1][1]["if-range"] == date


@pytest.mark.parametrize("known", [False, True])
def test_unnamed_versions_are_continued_only_under_a_checksum(
    site: Site, tmp_path: Path, known: bool
) -> None:
    site.pages["/a.zip"] = Page(BODY, tag=None)
    wanted = Download("a.zip", (f"{site.url}/a.zip",), md5=MD5 if known else None)
    have = interrupted(wanted, tmp_path)
    assert fetch(wanted, tmp_path).read_bytes() == BODY
    assert site.ranges() == [None, f"bytes={have}-" if known else None]


def test_a_server_that_ignores_ranges_starts_cleanly(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY, ranges=False)
    wanted = Download("a.zip", (f"{site.url}/a.zip",))
    have = interrupted(wanted, tmp_path)
    assert fetch(wanted, tmp_path).read_bytes() == BODY
    assert site.ranges() == [None, f"bytes={have}-"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_dropped_connection_is_continued(site: Site, tmp_path: Path, chunked: bool) -> None:
    site.pages["/a.zip"] = Page(BODY, drops=[DROP, DROP], chunked=chunked)
    path = fetch(Download("a.zip", (f"{site.url}/a.zip",)), tmp_path, pauses=NO_PAUSE)
    assert path.read_bytes() == BODY
    assert site.ranges() == [None, f"bytes={DROP}-", f"bytes={2 * DROP}-"]


def test_a_drop_within_the_first_bytes_is_not_taken_for_another_kind(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY, drops=[2])
    assert fetch(Download("a.zip", (f"{site.url}/a.zip",)), tmp_path, pauses=NO_PAUSE).read_bytes() == BODY


def test_a_drop_without_a_length_shows_by_the_known_size(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY, drops=[DROP], length=False)
    wanted = Download("a.zip", (f"{site.url}/a.zip",), size=len(BODY))
    assert fetch(wanted, tmp_path, pauses=NO_PAUSE).read_bytes() == BODY
    assert site.ranges() == [None, f"bytes={DROP}-"]


def test_pauses_are_taken_between_tries_and_then_the_next_mirror(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(download.time, "sleep", slept.append)
    site.pages["/bad.zip"] = Page(b"", status=503)
    site.pages["/a.zip"] = Page(BODY)
    urls = (f"{site.url}/bad.zip", f"{site.url}/a.zip")
    assert fetch(Download("a.zip", urls), tmp_path).read_bytes() == BODY
    assert slept == [1.0, 3.0, 9.0]
    assert [path for path, _ in site.requests] == ["/bad.zip"] * 4 + ["/a.zip"]


def test_tries_that_bring_much_do_not_count(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "WORTH_GOING_ON", DROP // 5)
    site.pages["/a.zip"] = Page(BODY, drops=[DROP // 5] * 12)
    assert fetch(Download("a.zip", (f"{site.url}/a.zip",)), tmp_path, pauses=(0.0,)).read_bytes() == BODY


def test_a_server_that_always_breaks_ends_in_one_line_and_keeps_the_part(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY, drops=[DROP, 0, 0, 0])
    url = f"{site.url}/a.zip"
    assert failure(Download("a.zip", (url,)), tmp_path) == (
        f"a.zip could not be downloaded ({url}: the connection broke during the download): download a.zip by "
        f"hand from {url} and put it into {tmp_path.as_posix()}, then run `vicinal data get pacs` again or "
        "`vicinal data check pacs`"
    )
    assert (tmp_path / "a.zip.part").read_bytes() == BODY[:DROP]
    assert len(site.requests) == 1 + len(NO_PAUSE)


def test_a_silent_server_is_left_after_the_timeout(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY, drops=[DROP], silent=threading.Event())
    wanted = Download("a.zip", (f"{site.url}/a.zip",))
    with pytest.raises(DataError, match="the server fell silent during the download"):
        fetch(wanted, tmp_path, timeout=0.05, pauses=())
    assert (tmp_path / "a.zip.part").read_bytes() == BODY[:DROP]
    site.pages["/a.zip"].silent.set()  # type: ignore[union-attr]


def test_a_server_that_never_answers_is_left_after_the_timeout(tmp_path: Path, site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/a.zip"
        assert f"({url}: no answer within 0.05 s)" in failure(
            Download("a.zip", (url,)), tmp_path, timeout=0.05
        )


def test_each_mirror_has_its_reason_and_none_is_asked_twice(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(download.time, "sleep", slept.append)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    site.pages["/page.zip"] = Page(PAGE, kind="text/html")
    site.pages["/short.zip"] = Page(BODY[:-1])
    site.pages["/empty.zip"] = Page(b"", length=False)
    site.pages["/other.zip"] = Page(b"Rar!" * 99)
    found = {
        f"http://127.0.0.1:{port}/a.zip": "no connection (Connection refused)",
        f"{site.url}/none.zip": "HTTP 404 Not Found",
        f"{site.url}/page.zip": "a web page instead of the file",
        f"{site.url}/short.zip": f"{len(BODY) - 1:,} bytes instead of {len(BODY):,}",
        f"{site.url}/empty.zip": "an empty file",
        f"{site.url}/other.zip": "not a .zip file by its first bytes",
    }
    line = failure(Download("a.zip", tuple(found), size=len(BODY)), tmp_path)
    assert f"({'; '.join(f'{url}: {why}' for url, why in found.items())})" in line
    assert names(tmp_path) == {"a.zip.lock"}
    assert len(site.requests) == 5
    assert slept == []


def test_without_an_address_the_line_says_what_to_put_where(tmp_path: Path) -> None:
    line = failure(Download("a.zip", (), folder="raw"), tmp_path)
    begin = "a.zip could not be downloaded (no address is known): download a.zip by hand and put it into "
    assert line.startswith(f"{begin}{tmp_path.as_posix()}/raw, then run `vicinal data get pacs` again")


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_a_wrong_checksum_removes_the_file_and_takes_the_next_mirror(
    site: Site, tmp_path: Path, algorithm: str
) -> None:
    other = zipped(NOISE[::-1])
    site.pages["/lies.zip"] = Page(other)
    expected = {"md5": MD5, "sha256": SHA256}[algorithm]
    url = f"{site.url}/lies.zip"
    first = Download("a.zip", (url,), **{algorithm: expected})  # type: ignore[arg-type]
    found = hashlib.new(algorithm, other).hexdigest()
    reason = f"a wrong checksum ({algorithm} {found} instead of {expected}); removed"
    assert f"({url}: {reason})" in failure(first, tmp_path)
    assert not (tmp_path / "a.zip.part").exists()
    assert len(site.requests) == 1
    site.pages["/a.zip"] = Page(BODY)
    both = Download("a.zip", (url, f"{site.url}/a.zip"), **{algorithm: expected})  # type: ignore[arg-type]
    assert fetch(both, tmp_path).read_bytes() == BODY


def test_bytes_of_one_mirror_are_continued_from_another_under_a_checksum(site: Site, tmp_path: Path) -> None:
    site.pages["/one.zip"] = Page(BODY, drops=[DROP, 0])
    site.pages["/two.zip"] = Page(BODY, tag='"other"')
    urls = (f"{site.url}/one.zip", f"{site.url}/two.zip")
    assert fetch(Download("a.zip", urls, sha256=SHA256), tmp_path, pauses=(0.0,)).read_bytes() == BODY
    assert site.ranges() == [None, f"bytes={DROP}-", f"bytes={DROP}-"]
    assert "if-range" not in site.requests[2][1]


def test_a_continued_file_that_turns_out_wrong_gets_one_try_from_its_beginning(
    site: Site, tmp_path: Path
) -> None:
    site.pages["/a.zip"] = Page(BODY)
    (tmp_path / "a.zip.part").write_bytes(bytes(DROP))
    assert fetch(Download("a.zip", (f"{site.url}/a.zip",), sha256=SHA256), tmp_path).read_bytes() == BODY
    assert site.ranges() == [f"bytes={DROP}-", None]


def test_a_whole_part_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").write_bytes(BODY)
    wanted = Download("a.zip", (f"{site.url}/a.zip",), size=len(BODY), sha256=SHA256)
    assert fetch(wanted, tmp_path).read_bytes() == BODY
    assert site.requests == []


@pytest.mark.parametrize("extra", [b"", b"too much"])
def test_a_part_that_is_long_enough_but_wrong_starts_anew(site: Site, tmp_path: Path, extra: bytes) -> None:
    site.pages["/a.zip"] = Page(BODY)
    (tmp_path / "a.zip.part").write_bytes(BODY[::-1] + extra)
    wanted = Download("a.zip", (f"{site.url}/a.zip",), size=len(BODY), sha256=SHA256)
    assert fetch(wanted, tmp_path, pauses=NO_PAUSE).read_bytes() == BODY


def test_a_refused_range_starts_anew(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY)
    wanted = Download("a.zip", (f"{site.url}/a.zip",))
    interrupted(wanted, tmp_path)
    site.pages["/a.zip"].status = 416
    assert "no more bytes than have arrived" in failure(wanted, tmp_path)
    assert not (tmp_path / "a.zip.part").exists()
    site.pages["/a.zip"].status = 200
    assert fetch(wanted, tmp_path).read_bytes() == BODY


def test_another_range_than_asked_for_is_not_appended(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY, claims=7)
    wanted = Download("a.zip", (f"{site.url}/a.zip",))
    have = interrupted(wanted, tmp_path)
    assert fetch(wanted, tmp_path, pauses=NO_PAUSE).read_bytes() == BODY
    assert site.ranges() == [None, f"bytes={have}-", None]


def test_more_bytes_than_expected_are_not_stored(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY * 3, length=False)
    wanted = Download("a.zip", (f"{site.url}/a.zip",), size=len(BODY))
    assert f": more than {len(BODY):,} bytes)" in failure(wanted, tmp_path)
    assert not (tmp_path / "a.zip.part").exists()


@pytest.mark.parametrize("kind", ["text/html; charset=utf-8", "application/zip"])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf \n"])
def test_a_web_page_is_refused_and_spares_what_has_arrived(
    site: Site, tmp_path: Path, kind: str, before: bytes
) -> None:
    site.pages["/a.zip"] = Page(BODY)
    wanted = Download("a.zip", (f"{site.url}/a.zip",))
    have = interrupted(wanted, tmp_path)
    site.pages["/a.zip"] = Page(before + PAGE, kind=kind, ranges=False)
    assert f"({site.url}/a.zip: a web page instead of the file)" in failure(wanted, tmp_path)
    assert (tmp_path / "a.zip.part").read_bytes() == BODY[:have]
    site.pages["/a.zip"] = Page(BODY)
    assert fetch(wanted, tmp_path).read_bytes() == BODY


def test_an_archive_called_a_web_page_is_taken_by_its_bytes(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY, kind="text/html")
    assert fetch(Download("a.zip", (f"{site.url}/a.zip",)), tmp_path).read_bytes() == BODY


@pytest.mark.parametrize(
    ("page", "status", "reason"),
    [
        (QUOTA, 200, "Google Drive's download quota for this file is used up, try again in a day"),
        (QUOTA, 403, "Google Drive's download quota for this file is used up, try again in a day"),
        (PAGE, 200, "a web page instead of the file, Google Drive may no longer share it"),
        (PAGE, 404, "HTTP 404 Not Found"),
    ],
)
def test_google_drive_says_why_in_one_line(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: bytes, status: int, reason: str
) -> None:
    monkeypatch.setattr(connection, "DRIVE_FILE", site.url + "/drive?id={}")
    site.pages["/drive?id=1aB-_9"] = Page(page, kind="text/html", status=status)
    line = failure(Download("a.zip", ("gdrive:1aB-_9",)), tmp_path)
    assert f"(https://drive.google.com/file/d/1aB-_9/view: {reason})" in line
    assert "by hand from https://drive.google.com/file/d/1aB-_9/view and" in line
    site.pages["/drive?id=1aB-_9"] = Page(BODY)
    assert fetch(Download("a.zip", ("gdrive:1aB-_9",)), tmp_path).read_bytes() == BODY


def test_the_address_of_google_drive() -> None:
    expected = "https://drive.usercontent.google.com/download?id=X&export=download&confirm=t"
    assert connection.DRIVE_FILE.format("X") == expected


@pytest.mark.parametrize("size", [None, len(BODY)])
def test_the_disk_must_have_room_for_the_rest_and_for_unpacking(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    site.pages["/a.zip"] = Page(BODY)
    urls = (f"{site.url}/a.zip", f"{site.url}/a.zip")
    have = interrupted(Download("a.zip", urls), tmp_path)
    free = len(BODY) - have
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free - 1))
    rest = f"{free / 1000:.1f} kB"
    assert failure(Download("a.zip", urls, size), tmp_path) == (
        f"downloading a.zip needs {rest}, '{tmp_path.as_posix()}' has {(free - 1) / 1000:.1f} kB free: "
        "free some disk space or choose another folder with --data-dir"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free + len(BODY)))
    needed = f"downloading and unpacking a.zip needs {(free + int(1.1 * len(BODY))) / 1000:.1f} kB, '"
    assert failure(Download("a.zip", urls, size, unpack=True), tmp_path).startswith(needed)
    assert (tmp_path / "a.zip.part").stat().st_size == have
    assert fetch(Download("a.zip", urls, size), tmp_path).read_bytes() == BODY


def test_two_at_once_download_once(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY)
    wanted = Download("a.zip", (f"{site.url}/a.zip",), sha256=SHA256)
    inside, twice = threading.Event(), threading.Event()
    found: list[Path] = []

    def stay(name: str, done: int, total: int | None) -> None:
        if not inside.is_set():
            inside.set()
            # Long enough for the other to come in, were it let.
            twice.wait(0.1)

    def run() -> None:
        found.append(fetch(wanted, tmp_path, progress=stay))

    threads = [threading.Thread(target=run) for _ in range(2)]
    threads[0].start()
    assert inside.wait(5)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert found == [tmp_path / "a.zip"] * 2
    assert len(site.requests) == 1
    assert names(tmp_path) == {"a.zip"}


def test_redirects_are_followed_with_their_range_but_not_to_other_protocols(
    site: Site, tmp_path: Path
) -> None:
    site.pages["/a.zip"] = Page(BODY, drops=[DROP])
    site.pages["/moved.zip"] = Page(b"", status=302, location="/a.zip")
    site.pages["/ftp.zip"] = Page(b"", status=302, location="ftp://127.0.0.1/a.zip")
    site.pages["/file.zip"] = Page(b"", status=302, location=(tmp_path / "secret.zip").as_uri())
    (tmp_path / "secret.zip").write_bytes(BODY)
    moved = Download("a.zip", (f"{site.url}/moved.zip",))
    assert fetch(moved, tmp_path, pauses=NO_PAUSE).read_bytes() == BODY
    assert site.ranges() == [None, None, f"bytes={DROP}-", f"bytes={DROP}-"]
    line = failure(Download("b.zip", (f"{site.url}/ftp.zip", f"{site.url}/file.zip")), tmp_path)
    assert "ftp.zip: no connection (unknown url type: ftp); " in line
    assert "file.zip: HTTP 302 Found)" in line


def test_the_proxy_of_the_environment_is_used(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", site.url)
    site.pages["http://nowhere.invalid/a.zip"] = Page(BODY)
    path = fetch(Download("a.zip", ("http://nowhere.invalid/a.zip",)), tmp_path)
    assert path.read_bytes() == BODY


def test_a_spoilt_note_starts_anew(site: Site, tmp_path: Path) -> None:
    site.pages["/a.zip"] = Page(BODY)
    wanted = Download("a.zip", (f"{site.url}/a.zip",))
    for spoilt in ("", "[1]", '{"url": 3, "else": 4}', "\x00"):
        interrupted(wanted, tmp_path)
        (tmp_path / "a.zip.part.json").write_text(spoilt)
    assert fetch(wanted, tmp_path).read_bytes() == BODY
    assert set(site.ranges()) == {None}


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "raw").write_text("a file")
    line = failure(Download("a.zip", ("http://127.0.0.1:9/a.zip",), folder="raw"), tmp_path)
    assert line.startswith(f"'{tmp_path.as_posix()}/raw/a.zip' cannot be read or written (")
    assert line.endswith("): mend that or choose another folder with --data-dir")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"file": "../a.zip"}, "is not the name of a file"),
        ({"file": ""}, "is not the name of a file"),
        ({"folder": "../up"}, "is not a folder below"),
        ({"folder": "/abs"}, "is not a folder below"),
        ({"urls": ("ftp://host/a.zip",)}, "cannot be downloaded from"),
        ({"urls": ("file:///a.zip",)}, "cannot be downloaded from"),
        ({"urls": ("gdrive:",)}, "cannot be downloaded from"),
        ({"md5": "abc"}, "md5 takes 32"),
        ({"sha256": "A" * 64}, "sha256 takes 64 lower-case"),
        ({"size": 0}, "size must be"),
    ],
)
def test_entries_that_make_no_sense_are_refused(options: dict[str, object], problem: str) -> None:
    fields: dict[str, object] = {"file": "a.zip", "urls": ("https://host/a.zip",)} | options
    with pytest.raises(ConfigError, match=problem):
        Download(**fields)  # type: ignore[arg-type]
