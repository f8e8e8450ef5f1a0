"""What a record says of machine and code, against git's own answers in a checkout made for the test."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vicinal.benchmarks.bench import machine
from vicinal.benchmarks.bench.machine import all_versions, cpu_model, device_name, gpu_versions
from vicinal.versions import COMMIT, code_version, versions

CPU = torch.device("cpu")
Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Return git in a checkout with a package of two files, one commit."""
    monkeypatch.delenv(COMMIT, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    package = tmp_path / "repository" / "package"

    def run(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        told = subprocess.run(("git", *who, *words), cwd=package, capture_output=True, text=True, check=True)
        return told.stdout.strip()

    package.mkdir(parents=True)
    for name in ("versions.py", "other.py"):
        (package / name).write_text("a = 1\n")
    run("init", "-q", "..")
    run("add", ".")
    run("commit", "-qm", "all")
    return run


def test_a_checkout_names_its_commit(git: Git, tmp_path: Path) -> None:
    package = tmp_path / "repository" / "package"
    assert code_version(package) == {"commit": git("rev-parse", "HEAD"), "changes": "none"}
    (package.parent / "results.txt").write_text("outside of the package")
    assert code_version(package)["changes"] == "none"
    (package / "other.py").write_text("a = 2\n")
    assert code_version(package)["changes"] == "uncommitted"


def test_a_new_file_of_the_package_is_a_change(git: Git, tmp_path: Path) -> None:
    package = tmp_path / "repository" / "package"
    (package / "new.py").write_text("a = 2\n")
    assert code_version(package)["changes"] == "uncommitted"


def test_a_checkout_of_something_else_is_not_asked(git: Git, tmp_path: Path) -> None:
    installed = tmp_path / "repository" / "environment" / "package"
    installed.mkdir(parents=True)
    (installed / "versions.py").write_text("a = 1\n")
    assert code_version(installed) == {}


def test_without_a_checkout_the_environment_may_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv(COMMIT, " ")
    assert code_version(tmp_path) == {}
    monkeypatch.setenv(COMMIT, "0123abc\n")
    assert code_version(tmp_path) == {"commit": "0123abc", "commit_by": COMMIT}


def test_a_checkout_knows_better_than_the_environment(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMIT, "0123abc")
    assert code_version(tmp_path / "repository" / "package")["commit"] == git("rev-parse", "HEAD")


def test_without_git_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COMMIT, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_version() == {}


def test_versions_of_a_cpu_name_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "code_version", lambda: {"commit": "abc"})
    assert all_versions(CPU) == {**versions(), "commit": "abc"}


def test_a_gpu_has_three_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_versions() == {"cuda": "12.8", "cudnn": "91002"}  # there is no tool to ask for the driver
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 570.1\necho 570.1\n")
    tool.chmod(0o755)
    assert gpu_versions()["driver"] == "570.1"


def test_the_processor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nmodel name\t: A Fast One @ 3 GHz\nmodel name\t: A Fast One @ 3 GHz\n")
    assert cpu_model(facts) == "A Fast One @ 3 GHz"
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert cpu_model(tmp_path / "nowhere") == "arm"
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu_model(tmp_path / "nowhere") == "aarch64"


def test_the_device_is_named() -> None:
    assert device_name(CPU) == f"CPU, {cpu_model()}, {torch.get_num_threads()} threads"
