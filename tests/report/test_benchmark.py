import csv
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vicinal.benchmarks.spec import Expect, Figure, Spec
from vicinal.evaluation.example import Example, save_examples
from vicinal.evaluation.record import Record
from vicinal.report.benchmark import write_benchmark
from vicinal.report.board import make_board
from vicinal.report.figures import row_styles
from vicinal.report.views import headlines

MakeRecord = Callable[..., Record]
VOID = {"meta", "link", "img", "br", "hr", "wbr"}
HOSTILE = "<script>alert('x')</script>&\"q\" {{ 111 * 111 }} $x$"
MINUS = "\N{MINUS SIGN}"


class Page(HTMLParser):
    """Reads a page strictly: tags must nest and close; keeps attributes, tables and text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._region = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
        if found.get("role") == "region":
            self._region = found["aria-label"] or ""
            self.tables[self._region] = []
        if tag == "tr":
            self.tables[self._region].append([])
        if tag in ("td", "th"):
            self.tables[self._region][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "script" in self.open:
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.tables[self._region][-1][-1] += " " + data

    def row(self, table: str, name: str) -> list[str]:
        """Return the cells of the row that begins with a name, blanks as one."""
        rows = [[" ".join(cell.split()) for cell in row] for row in self.tables[table]]
        return next(row for row in rows if row[0].startswith(name))

    @property
    def sections(self) -> list[str]:
        return [str(found["id"]) for tag, found in self.tags if tag == "section"]


def page_of(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(digits_spec: Spec, digits_records: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("benchmark")
    image = torch.arange(64, dtype=torch.uint8).reshape(1, 8, 8)
    right_or_wrong = [("1", "7"), ("7", "1"), ("2", "3")]
    examples = [
        Example(image, "7", old, 0.523, new, 0.914, "90", "This paper") for old, new in right_or_wrong
    ]
    write_benchmark(digits_spec, digits_records, made, examples)
    return made


def per_seed(records: list[Record], method: str, size: int = 20) -> np.ndarray:
    """Return accuracy in percent (seeds, targets), by nothing but a loop."""
    found: dict[int, list[float]] = {}
    for record in records:
        if record.method == method and record.batch_size == size:
            found.setdefault(record.seed, []).append(100 * record.accuracy)
    return np.array([found[seed] for seed in sorted(found)])


def shown(value: float) -> str:
    text = f"{value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", MINUS)


def test_every_number_of_the_tables(folder: Path, digits_records: list[Record]) -> None:
    page = page_of(folder)
    erm, soft = (per_seed(digits_records, method) for method in ("erm", "soft"))
    row = page.row("Batches of 20, accuracy, %", "Soft")
    mean, std = soft.mean(), soft.mean(axis=1).std(ddof=1)
    gap = soft.mean(axis=1) - erm.mean(axis=1)
    assert row[1] == "84.0"
    assert row[2] == f"{mean:.1f} ± {std:.1f} 5 seeds"
    assert row[3].split()[0] == shown(mean - 84.0)
    assert row[4] == "+4.0"
    assert row[5].startswith(f"{shown(gap.mean())} better")
    # All five differences are positive, so 2 of the 32 patterns of signs are as far from zero.
    assert (gap > 0).all()
    assert row[5].endswith("p 0.062")
    by_target = page.row("Batches of 20 by target, accuracy, %", "Soft")
    for cell, values in zip(by_target[1:], soft.T, strict=True):
        assert cell.startswith(f"{values.mean():.1f} ± {values.std(ddof=1):.1f}")
        assert cell.endswith("5 seeds")
    assert f"paper 85.5 {shown(soft[:, 1].mean() - 85.5)}" in by_target[2]
    assert page.row("Calibration and cost, Batches of 20", "Soft")[1:] == [
        f"7.0 ± {np.std([5, 6, 7, 8, 9], ddof=1):.1f}",
        "1.500",
        "0.750",
        "0.5",
        "5",
    ]


def test_the_overview_has_every_cell_with_its_seeds(folder: Path, digits_records: list[Record]) -> None:
    page = page_of(folder)
    assert page.row("All settings", "Cited et al.")[1:] == ["paper 77.7", ""]
    few = per_seed(digits_records, "soft", 4)
    cell = page.row("All settings", "Soft")[2]
    assert cell == f"{few.mean():.1f} paper 70.0 {shown(few.mean() - 70.0)} 1 seed"
    assert page.row("All settings", "This paper")[2] == ""


def test_a_headline_compares_the_seeds_that_both_rows_have(
    digits_spec: Spec, digits_records: list[Record]
) -> None:
    """A difference stands beside the figure it is a difference to."""
    late = [r for r in digits_records if r.method == "erm" or r.seed >= 3]
    spec = replace(
        digits_spec, rows=tuple(replace(row, ours=row.method == "soft") for row in digits_spec.rows)
    )
    (column, row, sentence), *_ = headlines(make_board(spec, late))
    erm, soft = per_seed(late, "erm").mean(axis=1)[3:], per_seed(late, "soft").mean(axis=1)
    assert (column, row) == ("Batches of 20", "Soft")
    assert sentence.startswith(f"{soft.mean():.1f} ± ")
    assert sentence.endswith(f"{shown((soft - erm).mean())} against ERM baseline ({erm.mean():.1f}).")
    assert f"{erm.mean():.1f}" != f"{per_seed(late, 'erm').mean():.1f}", "else all seeds would do"


def test_single_seeds_are_marked(folder: Path) -> None:
    html = (folder / "report.html").read_text(encoding="utf-8")
    # One cell rests on one seed: in the overview, its table, twice by target, with the costs; and the legend.
    assert html.count('<span class="one">1 seed</span>') == 1 + 1 + 2 + 1
    assert html.count('<span class="one">1</span>') == 1


def test_expectations_are_told(folder: Path) -> None:
    text = " ".join(page_of(folder).text.split())
    assert "vicinal reproduce digits_two.toml" in text, "it is not among those that are shipped"
    assert "Expectations: 2 of 4 met" in text
    for line in (
        "✓ metBatches of 20: This paper at least 85.0",
        "✓ metBatches of 20: This paper above Soft",
        "✗ missedBatches of 4: Soft at least 99.0, give or take 0.5",
        "not measuredBatches of 20: Cited et al. at least 1.0",
    ):
        assert line in text


def test_of_many_expectations_those_that_were_met_are_folded(
    digits_spec: Spec, digits_records: list[Record], tmp_path: Path
) -> None:
    met = tuple(Expect("This paper", "Batches of 20", at_least=float(level)) for level in range(9))
    write_benchmark(replace(digits_spec, expects=(*met, *digits_spec.expects)), digits_records, tmp_path)
    page = page_of(tmp_path)
    shown, folded = page.text[page.text.index("Expectations:") :].split("11 met", 1)
    assert "11 of 13 met" in shown
    assert "missed" in shown
    assert "not measured" in shown
    assert "at least 85.0" not in shown
    assert folded[: folded.index("The paper's figures")].count("at least") == 10
    assert next(found for tag, found in page.tags if tag == "details") == {"class": "fold"}


def test_a_note_may_have_paragraphs(digits_spec: Spec, digits_records: list[Record], tmp_path: Path) -> None:
    write_benchmark(replace(digits_spec, note="One\nline.\n\nAnother.\n"), digits_records, tmp_path)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<p>One\nline.</p>\n<p>Another.</p>" in html


def test_the_protocol_of_every_cell_is_a_link_away(folder: Path) -> None:
    page = page_of(folder)
    ids = [found["id"] for _, found in page.tags if found.get("id")]
    assert len(ids) == len(set(ids)), "an id stands for one thing"
    links = [str(found["href"]) for tag, found in page.tags if tag == "a"]
    cells = {link for link in links if link.startswith("#cell-")}
    assert len(cells) == 5
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert page.text.count("same for all") == 2, "what a column shares is said once"
    assert "This paper-20-0" in page.text
    assert "adapter.lr0.0001 | 0.0002" in page.text


def test_a_run_by_run_table(folder: Path, digits_records: list[Record]) -> None:
    first = per_seed(digits_records, "erm")[0]
    found = page_of(folder).tables["ERM baseline, run by run"]
    shown_cells = [" ".join(cell.split()) for cell in found[1]]
    # The last table of that name is of the second column.
    first = per_seed(digits_records, "erm", 4)[0]
    assert shown_cells == ["0", *(f"{value:.2f}" for value in (*first, first.mean()))]


def test_figures_lie_beside_the_page_with_their_data(folder: Path, digits_records: list[Record]) -> None:
    names = {path.name for path in (folder / "figures").iterdir()}
    kinds = ("curves", "reliability", "ece", "cost")
    stems = {f"{kind}-batches-of-{size}" for kind in kinds for size in (4, 20)}
    stems.add("batch-size-digits-cnn-online-stream")
    assert names == {f"{stem}{ending}" for stem in stems for ending in (".png", ".csv")}
    for name in names:
        if name.endswith(".png"):
            with Image.open(folder / "figures" / name) as picture:
                assert picture.width > 300
    with (folder / "figures" / "ece-batches-of-20.csv").open() as file:
        lines = {line["row"]: line for line in csv.DictReader(file)}
    assert float(lines["Soft"]["ece_percent"]) == pytest.approx(7.0)
    assert 0 < float(lines["Soft"]["by_chance_percent"]) < 100
    with (folder / "figures" / "curves-batches-of-20.csv").open() as file:
        rows = [line for line in csv.DictReader(file) if (line["row"], line["target"]) == ("Soft", "90")]
    assert [int(line["images"]) for line in rows] == [20, 40, 59]
    assert [float(line["mean_percent"]) for line in rows] == pytest.approx([50, 60, 84])
    with (folder / "figures" / "batch-size-digits-cnn-online-stream.csv").open() as file:
        points = {(line["row"], line["batch_size"]): line for line in csv.DictReader(file)}
    assert float(points["Soft", "4"]["paper"]) == 70
    mean = per_seed(digits_records, "soft", 20).mean()
    assert float(points["Soft", "20"]["accuracy"]) == pytest.approx(mean)


def test_runs_that_two_columns_share_are_counted_and_drawn_once(
    digits_spec: Spec, digits_records: list[Record], tmp_path: Path
) -> None:
    again = replace(digits_spec.settings[0], name="Again, ECE", metric="ece")
    spec = replace(digits_spec, settings=(*digits_spec.settings, again))
    write_benchmark(spec, digits_records, tmp_path)
    page = page_of(tmp_path)
    assert f"\nruns{len(digits_records)}\n" in page.text
    assert page.text.count("as it is sure would still have") == 1, "below the one table that is of ECE"
    names = {path.stem for path in (tmp_path / "figures").glob("*.csv")}
    assert {name for name in names if "again" in name} == {"ece-again-ece", "reliability-again-ece"}
    assert {name for name in names if name.endswith("-20")} == {"curves-batches-of-20", "cost-batches-of-20"}
    assert {name for name in names if name.endswith("-4")} == {
        f"{kind}-batches-of-4" for kind in ("curves", "reliability", "ece", "cost")
    }, "nobody shares these"


def test_variants_of_one_method_leave_room_for_its_rivals(make: MakeRecord) -> None:
    rates = {"vnl": (0.9, 0.89, 0.88, 0.87, 0.86, 0.85, 0.84, 0.83), "soft": (0.7, 0.6), "tent": (0.5,)}
    records = [
        make(method=method, accuracy=rate, protocol={"adapter": {"lr": rate}})
        for method, found in rates.items()
        for rate in found
    ]
    board = make_board(None, [make(method="erm"), *records])
    drawn = [round(board.columns[0].cells[row].summary.mean) for row in row_styles(board) if row != "ERM"]
    assert drawn[:5] == [90, 89, 70, 60, 50]
    assert drawn[5:] == [88, 87, 86, 85][: len(drawn) - 5]


def test_figures_of_an_earlier_page_are_removed_and_others_left(
    digits_spec: Spec, digits_records: list[Record], tmp_path: Path
) -> None:
    (tmp_path / "figures").mkdir()
    for name in ("curves-old.png", "my-own.png", "curves.txt"):
        (tmp_path / "figures" / name).write_text("x")
    write_benchmark(digits_spec, digits_records[:10], tmp_path)
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"my-own.png", "curves.txt"} <= names
    assert "curves-old.png" not in names


def test_the_page_needs_nothing_from_outside(folder: Path) -> None:
    html = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"iframe", "object", "embed", "base", "form"}
    for tag, found in page.tags:
        assert not any(name.startswith("on") for name in found), tag
        for name in ("src", "srcset", "action", "data", "poster", "xlink:href"):
            assert (found.get(name) or "data:").startswith("data:"), tag
        assert (found.get("href") or "#").startswith(("#", "data:", "figures/")), tag
    for word in ("http:", "https:", "@import", "src=//"):
        assert word not in html


def test_what_cannot_be_seen_is_said(folder: Path) -> None:
    page = page_of(folder)
    drawings = [found for tag, found in page.tags if tag == "svg" and found.get("class") == "drawing"]
    # Two columns: two panels of curves, panels of reliability for each row, bars, costs; and the batch sizes.
    assert len(drawings) == 2 * 2 + (3 + 2) + 2 + 2 + 1
    assert all(found.get("role") == "img" and found.get("aria-label") for found in drawings)
    assert all(found.get("alt") for tag, found in page.tags if tag == "img")
    assert "Soft 84.0%" in next(
        str(f["aria-label"]) for f in drawings if "accuracy so far" in str(f["aria-label"])
    )
    heads = [found for tag, found in page.tags if tag == "th" and not found.get("scope")]
    assert all(found.get("class", "") in ("name", "first", "group", "group first") for found in heads)


def test_examples_are_told_apart(folder: Path) -> None:
    text = page_of(folder).text
    places = [
        text.index(part) for part in ("Wrong before, right after", "Right before, wrong after", "As right")
    ]
    assert places == sorted(places)
    assert "52%" in text
    assert "91%" in text


def test_a_folder_brings_its_own_examples(
    digits_spec: Spec, digits_records: list[Record], tmp_path: Path
) -> None:
    save_examples(
        tmp_path, [Example(torch.zeros(3, 4, 4).byte(), "cat", "dog", 0.5, "cat", 0.6, "90", "vnl", "Pets")]
    )
    write_benchmark(digits_spec, digits_records[:10], tmp_path)
    assert "Pets" in page_of(tmp_path).text


def test_all_sections_are_there_in_order(folder: Path) -> None:
    assert page_of(folder).sections == [
        "expectations",
        "results",
        "curves",
        "batch-size",
        "calibration",
        "cost",
        "examples",
        "protocol",
        "versions",
    ]


def test_what_is_missing_is_left_out(make: MakeRecord, tmp_path: Path) -> None:
    record = make(
        method="tent",
        curve=[],
        protocol={},
        versions={},
        reliability={"count": [], "confidence": [], "accuracy": []},
    )
    write_benchmark(None, [record], tmp_path)
    page = page_of(tmp_path)
    assert page.sections == ["results", "calibration", "cost", "protocol"]
    for word in ("paper", "against ERM", "By target", "Expectations", "None", "NaN"):
        assert word not in page.text, word
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"ece-digits", "cost-digits"}


def test_records_of_no_benchmark_best_first_after_the_reference(make: MakeRecord, tmp_path: Path) -> None:
    records = [
        make(method=method, accuracy=value + seed / 100, seed=seed)
        for method, value in (("tent", 0.6), ("vnl", 0.7), ("erm", 0.5), ("lame", 0.2))
        for seed in range(5)
    ]
    write_benchmark(None, records, tmp_path)
    page = page_of(tmp_path)
    rows = [" ".join(row[0].split()) for row in page.tables["digits, accuracy, %"][1:]]
    assert rows == ["ERM reference", "vnl", "tent", "lame"]
    assert page.row("digits, accuracy, %", "vnl")[2].startswith("+20.0 better")
    assert page.row("digits, accuracy, %", "lame")[2].startswith(f"{MINUS}30.0 worse")


def test_a_method_that_broke_down_is_shown_as_broken(make: MakeRecord, tmp_path: Path) -> None:
    nan = float("nan")
    records = [
        make(
            method=method, accuracy=value, ece=value, nll=value, brier=value, seed=seed, curve=[value, value]
        )
        for method, value in (("erm", 0.5), ("tent", nan))
        for seed in range(2)
    ]
    write_benchmark(None, records, tmp_path)
    assert "NaN" in page_of(tmp_path).row("digits, accuracy, %", "tent")[1]


def test_quick_runs_are_called_so(digits_spec: Spec, digits_records: list[Record], tmp_path: Path) -> None:
    quick = [
        replace(r, protocol=r.protocol | {"benchmark": r.protocol["benchmark"] | {"quick": True}})
        for r in digits_records[:10]
    ]
    write_benchmark(digits_spec, quick, tmp_path)
    assert "Quick run." in page_of(tmp_path).text


def test_every_text_is_escaped(digits_spec: Spec, make: MakeRecord, tmp_path: Path) -> None:
    spec = replace(
        digits_spec,
        title=HOSTILE,
        note=HOSTILE,
        paper=HOSTILE,
        rows=(replace(digits_spec.rows[1], label=HOSTILE),),
        settings=(replace(digits_spec.settings[0], name=HOSTILE),),
        figures=(Figure(HOSTILE, HOSTILE, 50.0),),
        expects=(replace(digits_spec.expects[0], row=HOSTILE, setting=HOSTILE),),
    )
    place = {"spec": spec.name, "setting": HOSTILE, "row": HOSTILE}
    records = [
        make(
            target=target,
            dataset=HOSTILE,
            backbone=HOSTILE,
            seed=seed,
            protocol={"benchmark": place, HOSTILE: HOSTILE},
            versions={HOSTILE: HOSTILE},
        )
        for target in ("0", "90", HOSTILE)
        for seed in range(2)
    ]
    image = torch.zeros(3, 4, 4, dtype=torch.uint8)
    example = Example(image, HOSTILE, HOSTILE, 0.5, HOSTILE, 0.5, HOSTILE, HOSTILE, HOSTILE)
    write_benchmark(spec, records, tmp_path, [example])
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.count("<script") == 1, "the page's own"
    assert "alert('x')</script>" not in html
    page = Page(html)
    assert page.text.count("alert('x')") > 15
    assert "12321" not in html


def test_the_same_records_give_the_same_page(
    digits_spec: Spec, digits_records: list[Record], tmp_path: Path
) -> None:
    for name in ("a", "b"):
        write_benchmark(digits_spec, digits_records[:10], tmp_path / name)
    for one in (tmp_path / "a").rglob("*.*"):
        assert one.read_bytes() == (tmp_path / "b" / one.relative_to(tmp_path / "a")).read_bytes(), one.name


def test_a_page_alone_links_to_no_files(
    digits_spec: Spec, digits_records: list[Record], tmp_path: Path
) -> None:
    for name, page_only in (("alone", True), ("whole", False)):
        write_benchmark(digits_spec, digits_records[:10], tmp_path / name, page_only=page_only)
        html = (tmp_path / name / "report.html").read_text(encoding="utf-8")
        assert (tmp_path / name / "figures").exists() != page_only
        assert ("figures/" in html) != page_only
        assert "<svg" in html
