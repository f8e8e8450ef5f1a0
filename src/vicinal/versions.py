"""The versions that a result depends on."""

import platform
from contextlib import suppress
from importlib import metadata

PACKAGES = ("torch", "torchvision", "timm", "vicinal")
# Where this one is missing, slower code does its work and rounds differently.
OPTIONAL = ("numba",)


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


__version__ = versions()["vicinal"]
