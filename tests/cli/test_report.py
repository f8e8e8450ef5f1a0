import gzip
from pathlib import Path
from typing import Any

import pytest

from vicinal.evaluation.record import Record, append_record


def record(seed: int, spec: str | None = None, **changes: Any) -> Record:
    place = {
        "spec": spec,
        "setting": "MNIST",
        "row": "ERM baseline",
        "key": "k",
        "model": "m",
        "quick": False,
    }
    values: dict[str, Any] = {
        "dataset": "rotated_mnist",
        "target": "90",
        "backbone": "resnet18",
        "algorithm": "erm",
        "method": "erm",
        "statistics": "source",
        "predict": "own",
        "stream": "online",
        "seed": seed,
        "batch_size": 20,
        "accuracy": 0.875,
        "ece": 0.1,
        "nll": 1.5,
        "brier": 0.75,
        "curve": [0.25, 0.5],
        "seconds": 2.0,
        "images_per_second": 100.0,
        "reliability": {"count": [4.0], "confidence": [0.9], "accuracy": [0.5]},
        "protocol": {"benchmark": place} if spec else {},
        "versions": {},
    }
    return Record(**(values | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "found"


def test_a_page_of_any_records(vicinal: Any, folder: Path) -> None:
    for seed in range(2):
        append_record(folder / "records.jsonl", record(seed))
    ran = vicinal("report", folder)
    assert ran.code == 0
    assert "2 records" in ran.out
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "87.5" in page
    assert "Results on rotated mnist" in page
    assert (folder / "figures" / "curves-rotated-mnist.csv").exists()


def test_a_page_of_a_comparison(vicinal: Any, folder: Path) -> None:
    append_record(folder / "records.jsonl", record(0, "compare"))
    assert vicinal("report", folder).code == 0
    assert "Results on rotated mnist" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_page_of_a_benchmark_by_what_its_records_say(vicinal: Any, folder: Path) -> None:
    folder.mkdir()
    lines = [record(0, "rotated", target=target).to_json() for target in ("0", "90")]
    with gzip.open(folder / "records.jsonl.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    assert vicinal("report", folder).code == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Rotated MNIST and Fashion-MNIST" in page
    assert "93.5" in page, "the paper's figure"


def test_what_cannot_be_reported(vicinal: Any, folder: Path) -> None:
    assert "no such file of records" in vicinal("report", folder / "nowhere").line
    append_record(folder / "records.jsonl", record(0, "rotated"))
    assert "unknown spec 'none'" in vicinal("report", folder, "--spec", "none").line
    assert "no record of benchmark 'ablation'" in vicinal("report", folder, "--spec", "ablation").line
    append_record(folder / "records.jsonl", record(0, "ablation"))
    assert "several benchmarks (ablation, rotated): choose with --spec" in vicinal("report", folder).line
    own = folder.parent / "own"
    append_record(own / "records.jsonl", record(0, "mine"))
    assert "give its file, --spec FILE.toml" in vicinal("report", own).line
    assert not (own / "report.html").exists()


def test_a_file_of_records_has_its_page_beside_it(vicinal: Any, folder: Path) -> None:
    append_record(folder / "records.jsonl", record(0))
    (folder / "records.jsonl.gz").write_bytes(b"another one, perhaps older")
    assert "name the file that you mean" in vicinal("report", folder).line
    assert vicinal("report", folder / "records.jsonl").code == 0
    assert (folder / "report.html").exists()
