"""An address -> the bytes a server sends for it, or one clear reason why it sends none."""

import re
import socket
import ssl
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse, responses
from itertools import chain, islice
from typing import cast
from urllib import request
from urllib.error import HTTPError, URLError

from vicinal.data.archives import HEAD_BYTES, WEB_PAGE, wrong_kind

CHUNK = 1 << 18
AGENT = "vicinal"
PASSING_TROUBLE = frozenset({408, 425, 429, 500, 502, 503, 504})
RANGE_REFUSED = 416
DRIVE = "gdrive:"
DRIVE_FILE = "https://drive.usercontent.google.com/download?id={}&export=download&confirm=t"
DRIVE_PAGE = "https://drive.google.com/file/d/{}/view"
DRIVE_QUOTA_WORDS = (b"quota exceeded", b"too many users")
# Only these: what a server redirects to may not be read from this disk or by another protocol.
HANDLERS = (
    request.ProxyHandler,
    request.UnknownHandler,
    request.HTTPHandler,
    request.HTTPSHandler,
    request.HTTPDefaultErrorHandler,
    request.HTTPRedirectHandler,
    request.HTTPErrorProcessor,
)


class MirrorError(Exception):
    """Why a mirror did not deliver.

    `again` where another try may succeed, `restart` where it must begin from the first byte.
    """

    def __init__(self, reason: str, again: bool = False, restart: bool = False) -> None:
        super().__init__(" ".join(reason.split()))
        self.again = again
        self.restart = restart


@dataclass(frozen=True)
class Reply:
    """What a server sends: bytes `start` to the end of a file of `total` bytes, where it says so.

    `validator` is the server's own name for this version of the file.
    """

    start: int
    total: int | None
    validator: str | None
    pieces: Iterator[bytes]


def is_address(url: str) -> bool:
    """Return whether the address is one that can be downloaded from: http(s), or 'gdrive:<id>'."""
    return re.fullmatch(rf"https?://[^/\s]\S*|{DRIVE}[\w-]+", url) is not None


def page_of(url: str) -> str:
    """Return the address as a browser takes it."""
    return DRIVE_PAGE.format(url.removeprefix(DRIVE)) if url.startswith(DRIVE) else url


@contextmanager
def connect(
    url: str, file: str, have: int, validator: str | None, timeout: float
) -> Generator[Reply, None, None]:
    """Yield the reply to a request for what is missing of the file after its first `have` bytes.

    It may start at byte 0 all the same. With a validator it does so unless the server still has that version.
    A web page, or what is not such a file by its first bytes, raises before a byte is handed out.
    """
    headers = {"User-Agent": AGENT}
    if have:
        headers["Range"] = f"bytes={have}-"
        if validator is not None:
            headers["If-Range"] = validator
    with closing(_open(url, headers, timeout)) as response:
        start, total = _span(response, have)
        pieces = _pieces(response, None if total is None else total - start, timeout)
        if start == 0:
            pieces = _refuse_foreign(url, file, response.headers.get("Content-Type", ""), pieces)
        yield Reply(start, total, _validator(response), pieces)


def _open(url: str, headers: dict[str, str], timeout: float) -> HTTPResponse:
    """Return the open response; raise with the reason where there is none."""
    director = request.OpenerDirector()
    for handler in HANDLERS:
        director.add_handler(handler())
    address = DRIVE_FILE.format(url.removeprefix(DRIVE)) if url.startswith(DRIVE) else url
    try:
        return cast(HTTPResponse, director.open(request.Request(address, headers=headers), timeout=timeout))
    except HTTPError as error:
        with closing(error):
            raise _http_failure(url, error) from error
    except (OSError, HTTPException, ValueError) as error:
        raise _no_connection(error, timeout) from error


def _http_failure(url: str, error: HTTPError) -> MirrorError:
    """Return the reason for a reply with an error code."""
    if error.code == RANGE_REFUSED:
        return MirrorError("the server has no more bytes than have arrived", again=True, restart=True)
    if url.startswith(DRIVE):
        with suppress(OSError, HTTPException):
            if _names_quota(error.read(CHUNK)):
                return _page_failure(url, quota=True)
    # Not the message that came with it, which may be of many lines.
    phrase = responses.get(error.code, "")
    return MirrorError(f"HTTP {error.code} {phrase}", again=error.code in PASSING_TROUBLE)


def _no_connection(error: Exception, timeout: float) -> MirrorError:
    """Return the reason for a connection that was not made or that broke."""
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        return MirrorError(f"no answer within {timeout:g} s", again=True)
    why = (cause.strerror if isinstance(cause, OSError) else None) or str(cause) or type(cause).__name__
    # Trying again at once does not mend these; without a network it would only make the user wait.
    lasting = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError, ValueError, str)
    return MirrorError(f"no connection ({why})", again=not isinstance(cause, lasting))


def _span(response: HTTPResponse, have: int) -> tuple[int, int | None]:
    """Return the first byte the reply brings and the size of the whole file, None where it is not said."""
    length = response.headers.get("Content-Length", "")
    if response.status != 206:
        # A length beside a chunked body counts nothing.
        return 0, int(length) if length.isdecimal() and not response.chunked else None
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", "").strip())
    if found is None or int(found[1]) != have:
        raise MirrorError("the server sent another part than asked for", again=True, restart=True)
    return have, None if found[3] == "*" else int(found[3])


def _validator(response: HTTPResponse) -> str | None:
    """Return the strong ETag or else the date of the file; a weak ETag does not promise the same bytes."""
    tag: str | None = response.headers.get("ETag")
    dated: str | None = response.headers.get("Last-Modified")
    return tag if tag is not None and tag.startswith('"') else dated


def _pieces(response: HTTPResponse, left: int | None, timeout: float) -> Iterator[bytes]:
    """Yield the body as it arrives; raise where the connection breaks or ends before its length."""
    while left is None or left > 0:
        try:
            # read1 hands out what is there, so that a break loses nothing and progress is smooth.
            piece = response.read1(CHUNK if left is None else min(CHUNK, left))
        except (OSError, HTTPException) as error:
            broken = "the server fell silent" if isinstance(error, TimeoutError) else "the connection broke"
            raise MirrorError(f"{broken} during the download", again=True) from error
        if not piece and left is not None:
            raise MirrorError("the connection broke during the download", again=True)
        if not piece:
            return
        left = None if left is None else left - len(piece)
        yield piece


def _refuse_foreign(url: str, file: str, content_type: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Return the same bytes, their beginning seen not to be a web page or another kind of file."""
    head = b""
    for piece in pieces:
        head += piece
        if len(head) >= HEAD_BYTES:
            break
    wrong = wrong_kind(file, head[:HEAD_BYTES], content_type)
    if wrong == WEB_PAGE:
        with suppress(MirrorError):
            head += b"".join(islice(pieces, 8))
        raise _page_failure(url, _names_quota(head))
    if wrong is not None:
        raise MirrorError(wrong)
    return chain((head,), pieces)


def _names_quota(page: bytes) -> bool:
    """Return whether the page is the one by which Google Drive says that a file was asked for too often."""
    return any(words in page.lower() for words in DRIVE_QUOTA_WORDS)


def _page_failure(url: str, quota: bool) -> MirrorError:
    """Return the reason for a web page in place of the file."""
    if not url.startswith(DRIVE):
        return MirrorError(WEB_PAGE)
    if quota:
        return MirrorError("Google Drive's download quota for this file is used up, try again in a day")
    return MirrorError(f"{WEB_PAGE}, Google Drive may no longer share it")
