"""The versions that a result depends on."""

import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "torchvision", "timm", "vicinal")
# Where this one is missing, slower code does its work and rounds differently.
OPTIONAL = ("numba",)
COMMIT = "VICINAL_COMMIT"  # names the commit where the files have come without their repository
PATIENCE = 10.0  # seconds for git


def versions() -> dict[str, str]:
    """Return the versions of Python and of every package that can change a number."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    for package in OPTIONAL:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def code_version(package: Path = Path(__file__).parent) -> dict[str, str]:
    """Return the commit of the checkout that the package lies in, and whether the package differs from it.

    Without a checkout, what VICINAL_COMMIT says; nothing where that says nothing.
    """
    # Packages may be installed inside a checkout of something else: the right one knows this file.
    known = _git(package, "ls-files", "--error-unmatch", Path(__file__).name)
    commit = None if known is None else _git(package, "rev-parse", "HEAD")
    changes = None if commit is None else _git(package, "status", "--porcelain", "--", ".")
    if commit is None or changes is None:
        told = os.environ.get(COMMIT, "").strip()
        return {"commit": told, "commit_by": COMMIT} if told else {}
    return {"commit": commit, "changes": "uncommitted" if changes else "none"}


def made_by() -> dict[str, str]:
    """Return what a record says of the software behind it: packages, and the commit where there is one."""
    return {**versions(), **_own_code()}


@cache
def _own_code() -> dict[str, str]:
    """Return the version of the code, asked of git once: what runs is what was there then."""
    return code_version()


def _git(folder: Path, *words: str) -> str | None:
    """Return what git says in a folder; None where it fails. It takes no locks that others wait for."""
    command = ("git", "-C", str(folder), "--no-optional-locks", *words)
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip()


__version__ = versions()["vicinal"]
