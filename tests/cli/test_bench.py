"""`vicinal bench`: a tiny run to its end, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vicinal.benchmarks.bench.records import FILE, as_line, read_bench
from vicinal.benchmarks.bench.scale import QUICK, Shape

TINY = replace(
    QUICK,
    shape=Shape("small", 8, 4, 4, classes=3),
    rounds=2,
    growth={"classes": (3, 5), "domains": (2, 3)},
    streams=(8,),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vicinal.cli.bench.scale_for", lambda device, quick: TINY)


@pytest.mark.usefixtures("tiny")
def test_a_run_from_start_to_end_and_shown_again(vicinal: Any, tmp_path: Path) -> None:
    ran = vicinal("bench", "--device", "cpu", "--quick", "--out", "here")
    assert ran.code == 0, (ran.out, ran.err)
    records = read_bench(tmp_path / "here")
    assert {record.part for record in records} == {"goals", "profile", "growth"}
    assert [record.error for record in records if record.error] == []
    assert all(record.device.startswith("CPU") and record.versions["torch"] for record in records)
    assert "VNL first order (fp32)" in ran.out
    assert "no goal is judged" in ran.out
    assert [path.name for path in (tmp_path / "here").iterdir() if path.name.startswith(".")] == []
    readme = (tmp_path / "here" / "README.md").read_text()
    assert "vicinal bench --device cpu --quick --out here" in readme
    assert (tmp_path / "here" / "growth.png").is_file()

    shown = vicinal("bench", "--show", "--out", "here")
    table = [line for line in ran.out.splitlines() if "x ERM step" in line]
    assert table
    assert table == [line for line in shown.out.splitlines() if "x ERM step" in line]
    assert (tmp_path / "here" / "README.md").read_text() == readme


@pytest.mark.usefixtures("tiny")
def test_a_case_that_failed_is_a_row_and_exit_code_1(vicinal: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def fails(*args: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("vicinal.benchmarks.bench.run.loop_marks", fails)
    ran = vicinal("bench", "--device", "cpu", "--only", "growth", "--out", "here")
    assert ran.code == 1
    assert "failed at 2: MemoryError: no room" in ran.out
    assert "ERM step: classes 3, 5" in ran.out


def test_what_it_refuses(vicinal: Any, tmp_path: Path) -> None:
    assert "unknown part 'speed'" in vicinal("bench", "--only", "speed").line
    assert "unknown device 'tpu'" in vicinal("bench", "--device", "tpu").line
    assert "nowhere holds no records" in vicinal("bench", "--show", "--out", "nowhere").line
    assert "leave --only away" in vicinal("bench", "--show", "--only", "goals", "--out", "nowhere").line
    deeper = vicinal("bench", "--device", "cpu", "--only", "deeper", "--out", "nowhere").line
    assert "'deeper' has no cases at the scale 'small'" in deeper
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("words", [("--show",), ("--device", "cpu", "--quick")])
def test_a_file_is_no_folder_for_records(vicinal: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("kept")
    assert "file is a file: --out takes a folder" in vicinal("bench", *words, "--out", "file").line
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.usefixtures("tiny")
def test_damaged_records_are_one_line(vicinal: Any, tmp_path: Path) -> None:
    ran = vicinal("bench", "--device", "cpu", "--only", "loop", "--out", "here")
    assert ran.code == 0, (ran.out, ran.err)
    assert "--only loop --out here" in (tmp_path / "here" / "README.md").read_text()
    path = tmp_path / "here" / FILE
    whole = path.read_text()
    path.write_text(whole + whole[:50])
    shown = vicinal("bench", "--show", "--out", "here")
    assert shown.code == 0
    assert f"{Path('here') / FILE}:2 is cut off: left out" in shown.out
    path.write_text(whole[:50] + "\n" + whole)
    for words in (("--show",), ("--device", "cpu", "--only", "loop")):
        assert f"{Path('here') / FILE}:1 is no record" in vicinal("bench", *words, "--out", "here").line


@pytest.mark.usefixtures("tiny")
def test_an_interrupted_run_keeps_what_was_there(vicinal: Any, tmp_path: Path, monkeypatch: Any) -> None:
    vicinal("bench", "--device", "cpu", "--only", "loop", "--out", "here")
    before = (tmp_path / "here" / FILE).read_bytes()

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vicinal.benchmarks.bench.run.loop_marks", interrupted)
    ran = vicinal("bench", "--device", "cpu", "--only", "loop", "--out", "here")
    assert ran.code == 130
    assert (tmp_path / "here" / FILE).read_bytes() == before


@pytest.mark.usefixtures("tiny")
def test_records_of_another_machine_stay(vicinal: Any, tmp_path: Path) -> None:
    vicinal("bench", "--device", "cpu", "--only", "growth", "--out", "here")
    path = tmp_path / "here" / FILE
    other = [replace(record, device="another") for record in read_bench(tmp_path / "here")]
    path.write_text("".join(as_line(record) + "\n" for record in other))
    before = path.read_bytes()
    assert "records of another run" in vicinal("bench", "--device", "cpu", "--out", "here").line
    assert path.read_bytes() == before
