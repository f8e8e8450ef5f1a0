"""`vicinal results` over records that the project keeps and over some of one's own."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from vicinal.benchmarks.metric import METRICS
from vicinal.cli.results import FORMATS
from vicinal.evaluation.record import Record

RESULTS = Path(__file__).parents[2] / "results"
KEPT = sorted(RESULTS.rglob("records.jsonl.gz"))


def record(**changes: Any) -> Record:
    values: dict[str, Any] = {
        **{"dataset": "digits", "target": "90", "backbone": "small", "algorithm": "erm", "method": "erm"},
        **{"statistics": "source", "predict": "own", "stream": "online", "seed": 0, "batch_size": 20},
        **{"accuracy": 0.5, "ece": 0.1, "nll": 1.5, "brier": 0.75, "curve": [], "seconds": 2.0},
        **{"images_per_second": 9.0, "reliability": {}, "protocol": {"adapter": {"lr": 0.1}}, "versions": {}},
    }
    return Record(**(values | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of records: erm and soft on two kinds of statistics, six seeds, two targets."""
    gains = {("erm", "source"): 0.0, ("soft", "batch"): 0.1, ("soft", "stream"): 0.2}
    records = [
        record(method=m, statistics=s, seed=seed, target=target, accuracy=0.5 + gain + seed / 100)
        for (m, s), gain in gains.items()
        for seed in range(6)
        for target in ("0", "90")
    ]
    (tmp_path / "mine").mkdir()
    text = "".join(one.to_json() + "\n" for one in records)
    (tmp_path / "mine" / "records.jsonl").write_text(text)
    return tmp_path / "mine"


def test_the_table(vicinal: Any, folder: Path) -> None:
    ran = vicinal("results", folder)
    assert (ran.code, ran.err) == (0, "")
    assert "accuracy, %: digits, small, online stream, batches of 20" in ran.out
    assert "72.5 ± 1.9" in ran.out
    assert "over 6 seeds" in ran.out


def test_filters_groups_metric_and_baseline(vicinal: Any, folder: Path) -> None:
    ran = vicinal(
        *("results", folder, "--where", "method=erm,soft", "--where", "statistics=source"),
        *("--where", "statistics=stream", "--by", "statistics,method", "--metric", "error"),
        *("--baseline", "source", "--format", "csv", "--per-target"),
    )
    lines = list(csv.DictReader(io.StringIO(ran.out)))
    assert [(line["statistics"], line["method"], line["target"]) for line in lines] == [
        (*row, target) for row in (("source", "erm"), ("stream", "soft")) for target in ("0", "90", "")
    ]
    assert float(lines[0]["mean"]) == pytest.approx(47.5)
    assert float(lines[-1]["difference"]) == pytest.approx(-20.0)
    assert float(lines[-1]["p"]) == 2 / 2**6


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (("--format", "md"), "**accuracy"),
        (("--format", "latex"), "% \\usepackage{booktabs}"),
        (("--format", "json"), "{"),
        (("--format", "csv"), "method,statistics,column"),
        ((), "accuracy"),
    ],
)
def test_formats_and_files(vicinal: Any, folder: Path, words: tuple[str, ...], start: str) -> None:
    shown = vicinal("results", folder, *words)
    assert shown.out.startswith(start)
    ran = vicinal("results", folder, *words, "--out", "new/table.txt")
    assert "36 records, 3 rows in new/table.txt" in ran.out
    written = Path("new/table.txt").read_text()
    if words:
        assert written == shown.out
    else:
        assert [line.split() for line in written.splitlines()] == [
            line.split() for line in shown.out.splitlines()
        ]


@pytest.mark.parametrize(
    ("name", "start"),
    [
        *(("a.tex", "% "), ("a.csv", "method"), ("a.CSV", "method"), ("a.md", "**"), ("a.json", "{")),
        *(("a.txt", "accuracy"), ("a", "accuracy")),
    ],
)
def test_the_format_follows_the_name_of_the_file(vicinal: Any, folder: Path, name: str, start: str) -> None:
    assert vicinal("results", folder, "--out", name).code == 0
    assert Path(name).read_text().startswith(start)


def test_an_unknown_suffix_is_refused_unless_the_format_is_said(
    vicinal: Any, folder: Path, tmp_path: Path
) -> None:
    line = vicinal("results", folder, "--out", "new/a.xyz").line
    assert "--out new/a.xyz: its suffix is none of .csv, .md, .tex, .json, .txt" in line
    assert "--format" in line
    assert not (tmp_path / "new").exists()
    assert vicinal("results", folder, "--out", "new/a.xyz", "--format", "csv").code == 0
    assert (tmp_path / "new" / "a.xyz").read_text().startswith("method")


def test_lines_of_a_format_are_not_wrapped(vicinal: Any, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("vicinal.cli.out.width", 30)
    ran = vicinal("results", folder, "--format", "json")
    assert json.loads(ran.out)["rows"][0]["label"] == "soft (stream)"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.parent.name)
def test_the_records_of_the_project(vicinal: Any, path: Path) -> None:
    ran = vicinal("results", path, "--format", "json")
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)["rows"]
    records = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    cells = [record["protocol"].get("benchmark") for record in records]
    if all(cells):  # of a table of the paper, which tells its rows apart by their labels
        assert {row["names"]["row"] for row in rows} == {cell["row"] for cell in cells}
    else:
        assert {row["names"]["method"] for row in rows} == {record["method"] for record in records}
    assert all(cell["complete"] for row in rows for cell in row["cells"] if cell is not None)


def test_there_are_records_of_the_project() -> None:
    assert len(KEPT) >= 3


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--where", "methud=vnl"), ("'methud'", "dataset", "method", "stream", "lr")),
        (("--where", "method=vnk"), ("'vnk'", "erm, soft")),
        (("--where", "method"), ("--where", "NAME=VALUE", "'method'")),
        (("--where", "=vnl"), ("--where", "NAME=VALUE")),
        (("--where", "method=erm", "--where", "statistics=batch"), ("none of the 36 records",)),
        (("--by", "method,streem"), ("'streem'", "statistics")),
        (("--by", "method"), ("statistics (batch, stream)", "--by", "--where statistics=batch")),
        (("--metric", "f1"), ("'f1'", "accuracy", "brier", "ece", "error", "nll")),
        (("--metric", "parameters"), ("parameters", "protocol")),
        (("--baseline", "soft"), ("'soft'", "erm, soft (batch), soft (stream)")),
        (("--format", "word"), ("'word'", "csv, json, latex, md, table")),
        (("--paper",), ("of a benchmark", "none")),
        (("--spec", "rotated"), ("--spec", "--paper")),
        (("--paper", "--spec", "rotatd"), ("'rotatd'", "rotated")),
        (("--paper", "--spec", "mine.toml"), ("mine.toml", "no such spec")),
        (("--paper", "--by", "row"), ("--paper", "--by")),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    vicinal: Any, folder: Path, snapshot: Any, words: tuple[str, ...], named: tuple[str, ...]
) -> None:
    before = snapshot()
    line = vicinal("results", folder, *words, "--out", "never.txt").line
    assert all(name in line for name in named), line
    assert snapshot() == before


def test_a_place_without_records(vicinal: Any, tmp_path: Path) -> None:
    assert "gone.jsonl: no such file of records" in vicinal("results", "gone.jsonl").line
    (tmp_path / "empty").mkdir()
    assert "neither records.jsonl nor records.jsonl.gz" in vicinal("results", "empty").line
    (tmp_path / "empty" / "records.jsonl").write_text("{}\n")
    assert "line 1" in vicinal("results", "empty").line


def test_the_paper_beside_ours(vicinal: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from vicinal.benchmarks.spec import load_spec

    spec = load_spec("rotated")
    figure = next(f for f in spec.figures if spec.row(f.row).method == "erm" and f.target is None)
    place = {"spec": "rotated", "setting": figure.setting, "row": figure.row, "quick": False}
    one = record(accuracy=0.875, protocol={"benchmark": place})
    (tmp_path / "records.jsonl").write_text(one.to_json() + "\n")
    ran = vicinal("results", tmp_path, "--paper", "--format", "json")
    row = next(row for row in json.loads(ran.out)["rows"] if row["label"] == figure.row)
    assert (row["cells"][0]["paper"], row["cells"][0]["mean"]) == (figure.value, 87.5)


def test_the_table_of_a_spec_of_ones_own(vicinal: Any, tmp_path: Path) -> None:
    folder, spec = RESULTS / "votes", RESULTS.parent / "benchmarks" / "votes.toml"
    assert "give its file, --spec FILE.toml" in vicinal("results", folder, "--paper").line
    ran = vicinal("results", folder, "--paper", "--spec", spec, "--format", "json")
    assert ran.code == 0, ran.err
    cells = [cell for row in json.loads(ran.out)["rows"] for cell in row["cells"]]
    assert all(cell["complete"] for cell in cells)


def documented() -> list[str]:
    lines = (RESULTS.parent / "docs" / "results.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("vicinal results ")]


@pytest.mark.parametrize("line", documented())
def test_the_commands_of_the_page_run(vicinal: Any, tmp_path: Path, line: str) -> None:
    (tmp_path / "results").symlink_to(RESULTS)
    ran = vicinal(*line.split()[1:])
    assert (ran.code, ran.err) == (0, "")
    assert ran.out


def test_the_page_has_commands_and_names_every_metric_and_format() -> None:
    text = (RESULTS.parent / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(documented()) >= 4
    assert all(name in text for name in (*METRICS, *FORMATS))
