"""What the commands share: the console, options that mean the same everywhere, and their checks."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from vicinal.benchmarks.options import real_options
from vicinal.errors import ConfigError

out = Console()

# The pages write options as Python does, as joint=True; JSON has the same values in other words.
PYTHON_VALUES = {"True": True, "False": False, "None": None}

Device = Annotated[str, typer.Option(help="auto, cpu or cuda; auto takes a GPU where there is one.")]
Seed = Annotated[int, typer.Option(help="The same seed on the same device gives the same result.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out unreadable images and list them.")]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where named data sets lie; default: VICINAL_DATA, else ~/vicinal-data."),
]

Options = Annotated[
    list[str] | None,
    typer.Option("--option", help="NAME=VALUE of the method, as agreement=1; may be given again."),
]


def device_named(name: str, *, elsewhere: bool = False) -> str:
    """Return the device to run on; one that is not there is refused, unless what runs will run elsewhere."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device '{name}': choose from auto, cpu, cuda")
    if name == "cuda" and not elsewhere and not torch.cuda.is_available():
        raise ConfigError("no CUDA device was found: use --device cpu or auto")
    return name


def at_least_one(value: int, option: str) -> int:
    """Return a number that counts something; less than one is refused."""
    if value < 1:
        raise ConfigError(f"{option} must be at least 1, not {value}")
    return value


def ready(folder: Path) -> Path:
    """Return a folder that takes files, or can be made: what would fail is told before the work."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"{there} is a file: choose another --out")
    try:
        with tempfile.TemporaryFile(dir=there):
            return folder
    except OSError as error:
        raise ConfigError(f"{there} takes no files ({error.strerror}): choose another --out") from error


def say(text: str, style: str | None = None) -> None:
    """Print a line as it is: brackets in a path are no markup, and a long path is not broken."""
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    """Return NAME=VALUE texts as a mapping; a name given twice is refused."""
    split = [text.partition("=") for text in texts]
    wrong = [text for text, (name, sign, _) in zip(texts, split, strict=True) if not name or not sign]
    if wrong:
        raise ConfigError(f"{option} takes NAME=VALUE, not '{wrong[0]}'")
    names = [name.strip() for name, _, _ in split]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{option} {name}=... was given twice: give it once")
    return dict(zip(names, (value.strip() for _, _, value in split), strict=True))


def names_in(text: str) -> list[str]:
    """Return the names of a comma-separated text, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def method_options(texts: Sequence[str] | None) -> dict[str, Any]:
    """Return options of a method by name; what is no value of JSON or Python is a word."""
    return real_options({name: _plain(text) for name, text in pairs(texts or (), "--option").items()})


def _plain(text: str) -> Any:
    if text in PYTHON_VALUES:
        return PYTHON_VALUES[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def list_bad(bad: Sequence[str], what: str = "unreadable images were left out:") -> None:
    """Print the images that could not be read, one a line."""
    if bad:
        say(f"{len(bad)} {what}")
        for line in bad:
            say(f"  {line}")
