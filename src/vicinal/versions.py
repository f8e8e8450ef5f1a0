"""The versions that a result depends on."""

import platform
from importlib import metadata

PACKAGES = ("torch", "torchvision", "timm", "vicinal")


def versions() -> dict[str, str]:
    """Return the versions of Python and of every package that can change a number."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


__version__ = versions()["vicinal"]
