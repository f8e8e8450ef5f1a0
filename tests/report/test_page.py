import base64
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from vicinal.errors import DataError
from vicinal.evaluation.record import Record
from vicinal.report.examples import Example, image_data_uri
from vicinal.report.page import write_report

MakeRecord = Callable[..., Record]
VOID = {"meta", "link", "img", "br", "hr", "line"}
HOSTILE = "<script>alert('x')</script>&\"q\""


class Page(HTMLParser):
    """Reads a page strictly: tags must nest and close; keeps attributes, table rows and text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def records(make: MakeRecord) -> list[Record]:
    return [
        make(method=m, statistics=s, predict=p, stream=stream, target=t, seed=seed, accuracy=a + seed / 100)
        for stream in ("online", "label_shift")
        for m, s, p, a in (
            ("none", "source", "own", 0.5),
            ("tent", "batch", "own", 0.6),
            ("vnl", "stream", "labels", 0.7),
        )
        for t in ("75", "90")
        for seed in range(2)
    ]


@pytest.fixture(scope="module")
def example() -> Example:
    image = torch.arange(64, dtype=torch.uint8).reshape(1, 8, 8)
    return Example(image, "7", "1", 0.523, "7", 0.914, "90")


@pytest.fixture(scope="module")
def html(records: list[Record], example: Example, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    choices = [{"rule": "none", "accuracy": 0.7}, {"rule": "tent", "accuracy": 0.8, "chosen": True}]
    write_report(records, [example], path, "Digits", ["A note."], choices=choices)
    return path.read_text(encoding="utf-8")


def test_every_row_is_there_with_its_numbers(html: str) -> None:
    rows = [[re.sub(r"\s+", " ", cell) for cell in row] for row in Page(html).rows]
    results = [row for row in rows if len(row) == 10 and row[0] != "method"]
    expected = [
        ("ERMreferenceerm · source statistics · own output", "50.5", ""),
        ("tenterm · batch statistics · own output", "60.5", "+10.0"),
        ("vnlerm · stream statistics · neighbor labels", "70.5", "+20.0"),
    ]
    rest = ["10.0± 0.0", "1.500", "0.750", "2"]
    assert results == 2 * [
        [name, f"{mean}± 0.7", gain, *rest, mean, mean, "1,234"] for name, mean, gain in expected
    ]
    assert ["tentchosen", "0.800"] in rows
    assert ["none", "0.700"] in rows


def test_only_the_best_accuracy_of_each_stream_is_bold(html: str) -> None:
    assert re.findall(r'<td class="best">([\d.]+)', html) == ["70.5", "70.5"]


def test_the_page_needs_nothing_from_outside(html: str) -> None:
    page = Page(html)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert (attributes.get(name) or "data:").startswith("data:"), tag
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    assert "url(" not in html


def test_all_parts_are_there_and_pictures_are_described(html: str) -> None:
    page = Page(html)
    sections = [attributes.get("id") for tag, attributes in page.tags if tag == "section"]
    assert sections == ["results", "curves", "reliability", "examples", "choices", "protocol", "versions"]
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    # 2 streams with 2 targets and 3 setups each, and the example.
    assert len(pictures) == 2 * (2 + 3) + 1
    assert all(picture["alt"] for picture in pictures)
    assert page.text.count("How to read this.") == 5
    for part in ("A note.", "step_size", "0.0001", "torch", "52%", "91%", "20.0 points above ERM (50.5%)"):
        assert part in page.text


def test_tables_scroll_in_their_own_box(html: str) -> None:
    tags = Page(html).tags
    for i, (tag, _) in enumerate(tags):
        if tag == "table":
            assert tags[i - 1][1].get("class") == "scroll"
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


def test_every_text_is_escaped(make: MakeRecord, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    records = [
        make(
            **dict.fromkeys(("dataset", "target", "backbone", "statistics", "predict", "stream"), HOSTILE),
            method=method,
            protocol={HOSTILE: HOSTILE},
            versions={HOSTILE: HOSTILE},
        )
        for method in (HOSTILE, "other")
    ]
    example = Example(
        torch.zeros(3, 4, 4, dtype=torch.uint8), *(HOSTILE, HOSTILE, 0.5, HOSTILE, 0.5, HOSTILE)
    )
    write_report(records, [example], path, HOSTILE, [HOSTILE], choices=[{HOSTILE: HOSTILE}])
    html = path.read_text(encoding="utf-8")
    assert "<script" not in html
    page = Page(html)
    assert page.text.count(HOSTILE) > 15
    assert "script" not in {tag for tag, _ in page.tags}


def test_a_small_report_has_no_empty_parts(make: MakeRecord, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_report(
        [make(method="tent", protocol={}, reliability={"count": [], "confidence": [], "accuracy": []})],
        [],
        path,
        "One",
        [],
    )
    page = Page(path.read_text(encoding="utf-8"))
    sections = [attributes.get("id") for tag, attributes in page.tags if tag == "section"]
    assert sections == ["results", "curves", "reliability", "versions"]
    assert "vs ERM" not in [cell for row in page.rows for cell in row]
    assert "±" not in "".join(cell for row in page.rows for cell in row)


def test_the_same_records_give_the_same_page(records: list[Record], example: Example, tmp_path: Path) -> None:
    write_report(records[:6], [example], tmp_path / "a.html", "Digits", [])
    write_report(records[:6], [example], tmp_path / "b.html", "Digits", [])
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_page_that_cannot_be_made_leaves_the_old_one(
    make: MakeRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(DataError, match="no records"):
        write_report([], [], path, "None", [])

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report([make()], [], path, "One", [])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8)])
def test_a_small_image_is_embedded_pixel_by_pixel(shape: tuple[int, ...]) -> None:
    image = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    kind, data = image_data_uri(image).split(",", 1)
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.size == (8, 8)
        assert picture.mode == ("L" if shape[0] == 1 else "RGB")
        pixels = torch.tensor(list(picture.convert("RGB").tobytes()), dtype=torch.uint8).reshape(8, 8, 3)
    assert torch.equal(pixels.permute(2, 0, 1), image.expand(3, 8, 8))


def test_a_large_image_is_shrunk_in_proportion() -> None:
    data = image_data_uri(torch.zeros(3, 600, 300, dtype=torch.uint8)).split(",", 1)[1]
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.size == (96, 192)


@pytest.mark.parametrize(
    "image", [torch.zeros(3, 4, 4), torch.zeros(2, 4, 4).byte(), torch.zeros(4, 4).byte()]
)
def test_an_image_of_another_kind_is_an_error(image: torch.Tensor) -> None:
    with pytest.raises(DataError, match="uint8 image"):
        image_data_uri(image)
