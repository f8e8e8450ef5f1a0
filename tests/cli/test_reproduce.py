"""`vicinal reproduce`: every table is planned without a look at any image, and a small one is run."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vicinal.benchmarks.spec import load_spec, spec_names
from vicinal.evaluation.record import read_records

TINY = Path(__file__).parents[1] / "benchmarks" / "tiny.toml"
ESTIMATED = (
    r"estimated, not measured: \d+ (seconds|minutes|hours|days) with 2 workers \(cpu\), "
    r"[\d.]+ GiB of memory each, [\d.]+ GiB of models on disk"
)
LEFT = r"left to do: (\d+) trainings with (\d+) left-out models, \d+ step sizes to choose, (\d+) measurements"
Snapshot = Callable[[], dict[str, bytes]]


@pytest.fixture
def no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads data now fails the test."""

    def load(*args: object, **options: object) -> None:
        raise AssertionError("data were loaded")

    for place in ("benchmarks.prepare.load_dataset", "data.load.decode_listing", "cli.reproduce.run_plans"):
        monkeypatch.setattr(f"vicinal.{place}", load)


@pytest.mark.usefixtures("no_images")
def test_what_a_gpu_would_do_is_told_without_one(
    vicinal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ("table3", "--device", "cuda", "--workers", 9, "--data-dir", tmp_path / "nothing")
    ran = vicinal("reproduce", *words, "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert "with 9 workers (cuda)" in ran.out
    refused = vicinal("reproduce", *words)
    assert refused.code != 0
    assert "no CUDA device was found" in refused.err


@pytest.mark.usefixtures("no_images")
@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
@pytest.mark.parametrize("name", spec_names())
def test_every_shipped_spec_is_planned_without_images(
    vicinal: Any, snapshot: Snapshot, tmp_path: Path, name: str, quick: bool
) -> None:
    before = snapshot()
    words = ["--dry-run", "--device", "cpu", "--workers", 2, "--data-dir", tmp_path / "nothing"]
    ran = vicinal("reproduce", name, *words, *(["--quick"] if quick else []))
    assert ran.code == 0, (ran.out, ran.err)
    spec = load_spec(name)
    assert ran.out.startswith(f"{name}: {spec.title}")
    for setting in spec.settings:
        assert setting.name in ran.out
    left = re.search(LEFT, ran.out)
    assert left is not None
    trainings, left_out, measurements = map(int, left.groups())
    assert trainings > 0
    assert measurements >= trainings
    assert (left_out > 0) == any(setting.out_of_fold is not None for setting in spec.settings)
    assert re.search(ESTIMATED, ran.out)
    for data in {setting.data for setting in spec.settings} - {"digits", "rotated_fashion"}:
        assert f"missing data: {data}: " in ran.out
    assert snapshot() == before


@pytest.mark.usefixtures("no_images")
def test_several_tables_are_planned_by_one_command(vicinal: Any, tmp_path: Path) -> None:
    words = ("--dry-run", "--device", "cpu", "--iterations", 7, "--data-dir", tmp_path / "nothing")
    ran = vicinal("reproduce", "rotated", "table9", "rotated", *words)
    assert ran.code == 0, (ran.out, ran.err)
    assert ran.out.count("left to do:") == 2
    assert "How far the target is from the sources" in ran.out


@pytest.mark.usefixtures("no_images")
def test_teaching_is_planned_without_any_training_of_source_models(vicinal: Any, tmp_path: Path) -> None:
    words = ("--dry-run", "--device", "cpu", "--workers", 2, "--data-dir", tmp_path / "nothing")
    whole, taught = (vicinal("reproduce", "rotated", *words, *more).out for more in ((), ("--teach",)))
    (trainings, left_out, _), (none, same, measured) = (
        re.search(LEFT, out).groups() for out in (whole, taught)
    )
    assert int(trainings) > 0
    assert left_out == same != "0"
    assert none == measured == "0"


def test_aliases_name_a_table_too(vicinal: Any) -> None:
    ran = vicinal("reproduce", "table3", "--dry-run", "--device", "cpu")
    assert ran.out.startswith("rotated: ")


def test_the_list_names_every_table(vicinal: Any) -> None:
    for words in (("--list",), ()):
        ran = vicinal("reproduce", *words)
        assert ran.code == 0
        assert all(name in ran.out for name in spec_names())
        assert "table3" in ran.out


def test_what_cannot_be_reproduced_is_one_line(vicinal: Any, tmp_path: Path) -> None:
    assert "unknown spec 'table99': choose from" in vicinal("reproduce", "table99").line
    assert "mine.toml: no such spec" in vicinal("reproduce", "mine.toml").line
    assert (
        "unknown setting, data set, row, source training or method 'x'"
        in vicinal("reproduce", "rotated", "--only", "x").line
    )
    assert "--seeds must be at least 1" in vicinal("reproduce", "rotated", "--seeds", 0).line
    assert "unknown backbone 'resnet0'" in vicinal("reproduce", "rotated", "--backbone", "resnet0").line
    (tmp_path / "bad.toml").write_text('title = "x"\nnotes = "y"\n')
    assert "bad.toml: unknown key 'notes'" in vicinal("reproduce", "bad.toml").line


def test_without_any_data_nothing_runs_and_the_exit_code_says_so(vicinal: Any, tmp_path: Path) -> None:
    ran = vicinal("reproduce", "mini_domainnet", "--data-dir", tmp_path / "nothing", "--device", "cpu")
    assert ran.code == 1
    assert "missing data: mini_domainnet: " in ran.out
    assert "vicinal data get mini_domainnet" in ran.out
    assert not list(tmp_path.rglob("records.jsonl"))


MORE = """
[[settings]]
name = "Photos"
data = "pacs"
targets = [["photo"]]
backbone = "small"
size = 32

[[settings]]
name = "Lost weights"
data = "digits"
backbone = "resnet18"
weights = "nowhere.safetensors"
out_of_fold = false
"""


@pytest.mark.slow
def test_a_small_table_from_start_to_end(vicinal: Any, tmp_path: Path) -> None:
    """One run: data that are missing and weights that are lost keep nothing else from being done."""
    (tmp_path / "mine.toml").write_text(TINY.read_text() + MORE)
    words = ("--quick", "--device", "cpu", "--workers", 1, "--data-dir", tmp_path / "nothing")
    ran = vicinal("reproduce", "mine.toml", *words)
    assert ran.code == 1, (ran.out, ran.err)
    out = tmp_path / "results" / "mine-quick"
    records = read_records(out / "records.jsonl")
    assert len(records) == 10 + 3
    assert all(record.protocol["benchmark"]["quick"] for record in records)
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    mean = sum(100 * r.accuracy for r in records if r.method == "erm" and r.stream == "online") / 2
    gap = f"{mean - 60:+.1f}".replace("-", "\N{MINUS SIGN}")
    assert f"ERM baseline 60.0 ± 1.0 {mean:.1f} (1) {gap}" in lines
    assert "Cited alone 99.0" in lines
    assert any(line.startswith("met: digits: This paper at least 1.0") for line in lines)
    assert any(line.startswith("missed: digits: ERM baseline at least 101.0") for line in lines)
    assert any(line.startswith("missing data: pacs: ") for line in lines)
    assert any("no weights 'nowhere.safetensors'" in line for line in lines)
    readme = (out / "README.md").read_text()
    assert "vicinal reproduce mine.toml --quick" in readme
    assert f"| ERM baseline | 60.0 ± 1.0 | {mean:.1f} (1) | {gap} |" in readme
    assert "missing data: pacs" in readme
    assert (out / "report.html").is_file()
    assert list((out / "figures").glob("*.png"))
    assert "models/" in (out / ".gitignore").read_text()
    assert len(json.loads((out / "models.json").read_text())) == 2  # with that of the lost weights

    again = vicinal("reproduce", "mine.toml", *words, "--only", "digits, mixed")
    assert again.code == 0  # nothing of it is missing
    assert read_records(out / "records.jsonl") == records
    left = vicinal("reproduce", "mine.toml", *words, "--dry-run")
    assert "left to do: 2 trainings with 3 left-out models" in left.out


@pytest.mark.slow
def test_teaching_leaves_small_files_and_nothing_to_report(vicinal: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("one_choice = true\n" + TINY.read_text() + MORE)
    words = ("--quick", "--seeds", 2, "--device", "cpu", "--workers", 1, "--data-dir", tmp_path / "nothing")
    ran = vicinal("reproduce", "mine.toml", "--teach", *words)
    assert ran.code == 1  # for want of PACS
    out = tmp_path / "results" / "mine-quick"
    small = "taught.safetensors, choice.json and step_sizes"
    said = " ".join(ran.out.split())
    assert f"left-out domains taught for 1 of 2 source models: {small} in results/mine-quick/models/*" in said
    assert "missing data: pacs: " in ran.out
    assert "not done" not in ran.out  # weights that only a column without left-out models needs
    found = {path.name for path in out.glob("models/*/*") if path.parent.name != "left_out"}
    assert found == {"taught.safetensors", "choice.json", "step_sizes"}
    left = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    assert left == {"models", "models.json", "choices.jsonl"}
