"""Paths with brackets, which rich takes for markup, are printed as they are and end nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest

ODD = ["a[/x]", "[bold]b", "c[red]d[/red]"]


@pytest.mark.parametrize("name", ODD)
def test_every_command_prints_the_path_it_was_given(
    vicinal: Any, model: Path, domains: Path, name: str
) -> None:
    data = shutil.copytree(domains, Path("data") / name)
    run = shutil.copytree(model, Path("runs") / name)
    words = ("--data", data, "--methods", "erm", "--out", name, "--device", "cpu")
    said = {
        ("evaluate", run, *words): f"1 records appended to {name}/records.jsonl",
        ("adapt", run, data / "light", "--out", name, "--device", "cpu"): f"in {name}/predictions.csv",
        ("report", name): f"the page in {name}/report.html, its figures in {name}/figures",
        ("results", name, "--out", f"{name}/table.csv"): f"1 rows in {name}/table.csv",
        ("data", "check", data): "sound",
    }
    for command, line in said.items():
        ran = vicinal(*command)
        assert ran.code == 0, (command, ran.err)
        assert line in ran.out


@pytest.mark.parametrize("name", ODD)
def test_training_says_where_the_model_is(vicinal: Any, domains: Path, name: str) -> None:
    small = ("--backbone", "small", "--size", 16, "--iterations", 2, "--batch-size", 4, "--device", "cpu")
    plain = ("--algorithm", "erm", "--no-out-of-fold")
    ran = vicinal("train", domains, "--target", "light", *small, *plain, "--out", name)
    assert ran.code == 0, ran.err
    assert f"model in {name}/model.safetensors" in ran.out


def test_a_long_path_is_not_broken(vicinal: Any, model: Path, domains: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("vicinal.cli.out.width", 40)
    name = "/".join(["a folder of a long name"] * 4)
    ran = vicinal("adapt", model, domains / "light", "--method", "erm", "--out", name, "--device", "cpu")
    assert f"20 predictions in {name}/predictions.csv" in ran.out
