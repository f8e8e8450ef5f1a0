"""The page in a real browser: Chromium, driven through its own pipe, without further packages."""

import base64
import fcntl
import io
import json
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vicinal.benchmarks.spec import Spec
from vicinal.evaluation.example import Example
from vicinal.evaluation.record import Record
from vicinal.report.benchmark import write_benchmark

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
SECONDS = 60


def _loaded(event: dict[str, Any], loader: str) -> bool:
    params = event["params"]
    return bool(
        event["method"] == "Page.lifecycleEvent" and params["name"] == "load" and params["loaderId"] == loader
    )


class Chromium:
    """One headless browser; `open` shows a file at a width, in light or dark."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # The browser reads descriptor 3 and writes 4; ours may have those very numbers: they move up first.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 64) for end in (to_browser, from_browser)]
        os.close(to_browser)
        os.close(from_browser)

        def hand_over() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=hand_over,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the browser's answer to one call; events that come before it are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], until - time.monotonic())
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has gone"
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(line)
        if "method" in answer:
            self.events.append(answer)
        return answer

    def open(self, path: Path, width: int, dark: bool = False, fragment: str = "") -> None:
        """Show a file as a screen of that width would, with its reader's choice of light or dark."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self._go("about:blank")
        self.events.clear()
        self._go(path.resolve().as_uri() + fragment)

    def _go(self, address: str) -> None:
        loader = self.call("Page.navigate", url=address)["loaderId"]
        while not any(_loaded(event, loader) for event in self.events):
            self._receive()

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """Return the whole page as a PNG."""
        box = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": box["width"], "height": box["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(answer["data"])

    def complaints(self) -> list[str]:
        """Return what the page said on the console as an error or a warning, and scripts that broke."""
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            if event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(str(params["entry"]["text"]))
        return found

    def requests(self) -> list[str]:
        """Return every address the page asked for, itself first."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        """End the browser."""
        for end in (self._in, self._out):
            os.close(end)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed (Debian: apt install chromium)")
    opened = Chromium(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(digits_spec: Spec, digits_records: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page with all sections, and with names as long as they come."""
    long_name = (
        "Soft pseudo label, stream statistics, meta-trained, with_a_name_that_cannot_break_anywhere_else"
    )
    rows = tuple(replace(row, label=_renamed(row.label, long_name)) for row in digits_spec.rows)
    figures = tuple(replace(figure, row=_renamed(figure.row, long_name)) for figure in digits_spec.figures)
    expects = tuple(
        replace(e, row=_renamed(e.row, long_name), above=None, at_least=1.0) for e in digits_spec.expects
    )
    spec = replace(digits_spec, rows=rows, figures=figures, expects=expects)
    records = []
    for record in digits_records:
        place = record.protocol["benchmark"]
        place = place | {"row": _renamed(place["row"], long_name)}
        facts = {"benchmark": place, "a.setting.with.a.long.name": "0123456789abcdef" * 20}
        records.append(replace(record, protocol=record.protocol | facts))
    example = Example(
        torch.arange(64).reshape(1, 8, 8).byte(), "seven", "one", 0.5, "seven", 0.9, "90", long_name
    )
    folder = tmp_path_factory.mktemp("page")
    write_benchmark(spec, records, folder, [example])
    return folder / "report.html"


def _renamed(label: str, long_name: str) -> str:
    return long_name if label == "Soft" else label


OPEN_ALL = "document.querySelectorAll('details').forEach(part => part.open = true)"
SCREENS = [(width, dark) for width in (360, 1200) for dark in (False, True)]


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_the_page_opens_without_complaint_and_asks_nothing_of_anyone(
    browser: Chromium, page: Path, width: int, dark: bool
) -> None:
    browser.open(page, width, dark)
    assert browser.complaints() == []
    first, *others = browser.requests()
    assert first == page.resolve().as_uri()
    assert all(address.startswith("data:") for address in others)


@pytest.mark.parametrize("width", [320, 360, 414, 768, 1200])
def test_the_page_never_scrolls_sideways(browser: Chromium, page: Path, width: int) -> None:
    browser.open(page, width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.evaluate(OPEN_ALL)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_tables_scroll_in_their_own_box_with_their_names_in_sight(browser: Chromium, page: Path) -> None:
    browser.open(page, 360)
    scrolled = browser.evaluate("""
        [...document.querySelectorAll('#results .scroll')].map(box => {
            box.scrollLeft = 1e4;
            const name = box.querySelector('tbody th.name').getBoundingClientRect();
            return [box.scrollLeft > 0, name.left >= box.getBoundingClientRect().left, name.width];
        })
    """)
    assert len(scrolled) == 5
    assert any(moved for moved, _, _ in scrolled), (
        "at 360 px the tables of this page are wider than the screen"
    )
    assert all(in_sight and 60 < width < 200 for _, in_sight, width in scrolled)


def test_letters_are_large_enough_on_a_phone(browser: Chromium, page: Path) -> None:
    browser.open(page, 360)
    browser.evaluate(OPEN_ALL)
    sizes = browser.evaluate("""
        [...document.querySelectorAll('main *')].filter(part => [...part.childNodes].some(
            node => node.nodeType === 3 && node.textContent.trim()) && part.getClientRects().length
        ).map(part => {
            const drawn = part.closest('svg');
            const scale = drawn ? drawn.getBoundingClientRect().width / drawn.viewBox.baseVal.width : 1;
            return parseFloat(getComputedStyle(part).fontSize) * scale;
        })
    """)
    assert len(sizes) > 200
    # Letters in the small reliability panels are the least.
    assert min(sizes) >= 8.5


@pytest.mark.parametrize("dark", [False, True])
def test_texts_stand_out_from_what_is_behind_them(browser: Chromium, page: Path, dark: bool) -> None:
    browser.open(page, 1200, dark)
    browser.evaluate(OPEN_ALL)
    pairs = browser.evaluate("""
        [...document.querySelectorAll('main *')].filter(part => !part.closest('svg')
            && part.getClientRects().length
            && [...part.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())
        ).map(part => {
            let behind = part;
            while (behind && getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') {
                behind = behind.parentElement;
            }
            const back = behind ? getComputedStyle(behind).backgroundColor : 'rgb(255, 255, 255)';
            return [getComputedStyle(part).color, back, part.textContent.trim().slice(0, 40)];
        })
    """)
    assert len(pairs) > 200
    weak = {
        (text, round(contrast(front, back), 1)) for front, back, text in pairs if contrast(front, back) < 4.5
    }
    assert not weak


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, as the web's accessibility guidelines define it."""
    light = []
    for colour in (one, other):
        channels = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        light.append(0.05 + float(np.dot(linear, (0.2126, 0.7152, 0.0722))))
    return max(light) / min(light)


@pytest.mark.parametrize("dark", [False, True])
def test_figures_follow_the_page_from_light_to_dark(browser: Chromium, page: Path, dark: bool) -> None:
    browser.open(page, 1200, dark)
    pixels = np.array(Image.open(io.BytesIO(browser.screenshot())).convert("L"))
    assert pixels.shape[0] > 2000
    box = browser.evaluate("""
        (() => { const box = document.querySelector('#curves svg.drawing').getBoundingClientRect();
                 return [box.left, box.top + scrollY, box.right, box.bottom + scrollY].map(Math.round); })()
    """)
    left, top, right, bottom = box
    drawing = pixels[top:bottom, left:right]
    background = np.median(drawing)
    assert background < 40 if dark else background > 240
    marks = np.abs(drawing.astype(int) - background) > 100
    assert 0.01 < marks.mean() < 0.3, "lines and letters can be told from the background"


def test_a_link_to_a_cell_opens_its_protocol(browser: Chromium, page: Path) -> None:
    browser.open(page, 360)
    link = "document.querySelector('#results a[href^=\"#cell-\"]')"
    name = browser.evaluate(f"{link}.getAttribute('href').slice(1)")
    assert not browser.evaluate(f"document.getElementById('{name}').checkVisibility()")
    browser.evaluate(f"{link}.click()")
    browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert browser.evaluate(f"document.getElementById('{name}').open")
    top = browser.evaluate(f"document.getElementById('{name}').getBoundingClientRect().top")
    assert 0 <= top < 400
    browser.open(page, 360, fragment=f"#{name}")
    assert browser.evaluate(f"document.getElementById('{name}').checkVisibility()")
    browser.open(page, 360, fragment="#nowhere%20")
    assert browser.complaints() == []
