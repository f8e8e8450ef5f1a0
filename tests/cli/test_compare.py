"""`vicinal compare`: what it refuses, and a small comparison on one's own data."""

from pathlib import Path
from typing import Any

import pytest

from vicinal.evaluation.record import read_records


def test_what_cannot_be_compared_is_one_line(vicinal: Any, domains: Path, tmp_path: Path) -> None:
    assert "unknown method 'softt'" in vicinal("compare", "digits", "--methods", "erm,softt").line
    assert "unknown dataset 'nowhere'" in vicinal("compare", "nowhere", "--target", "a").line
    assert "hold out with --target" in vicinal("compare", domains).line
    assert "--seeds must be at least 1" in vicinal("compare", "digits", "--seeds", 0).line
    away = vicinal("compare", "pacs", "--data-dir", tmp_path / "nothing").line
    assert "pacs was not found: vicinal data get pacs" in away


@pytest.mark.slow
def test_a_small_comparison(vicinal: Any, tmp_path: Path) -> None:
    words = ["--methods", "erm,soft", "--target", "90", "--seeds", 1, "--iterations", 2, "--workers", 1]
    ran = vicinal("compare", "digits", *words, "--choose-images", 20, "--out", "out")
    assert ran.code == 0, (ran.out, ran.err)
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert [(r.method, r.statistics, r.target) for r in records] == [
        ("erm", "source", "90"),
        ("soft", "batch", "90"),
        ("soft", "stream", "90"),
    ]
    erm = f"{100 * records[0].accuracy:.1f}"
    assert any(line.split()[:2] == ["ERM", erm] for line in ran.out.splitlines())
    assert "3 records in" in ran.out
    assert (tmp_path / "out" / "report.html").is_file()
