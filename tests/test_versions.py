"""What a record says of the code behind it, against git's own answers in a checkout made for the test."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vicinal import versions as module
from vicinal.versions import COMMIT, code_version, made_by, versions

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


@pytest.fixture
def unasked() -> Iterator[None]:
    """Have git be asked anew, before and after."""
    module._own_code.cache_clear()
    yield
    module._own_code.cache_clear()


@pytest.mark.usefixtures("unasked")
def test_git_is_asked_once_for_what_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "code_version", lambda: {"commit": "abc"})
    assert made_by() == {**versions(), "commit": "abc"}
    monkeypatch.setattr(module, "code_version", lambda: {"commit": "def"})
    assert made_by()["commit"] == "abc"
