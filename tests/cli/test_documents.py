"""The pages for people hold what they say: commands and options exist, code runs, links lead somewhere."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from torch import nn

from vicinal.cli import app

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted(path for part in ("*.md", "docs/**/*.md", "results/*/*.md") for path in ROOT.glob(part))
SPECS = sorted(path for part in ("benchmarks/*.toml", "src/**/*.toml") for path in ROOT.glob(part))
COMMAND = re.compile(r"(?:# )?(?:VICINAL_\w+=\S+ )?vicinal ((?:--|[a-z]).*)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
TINY = ("--backbone", "small", "--size", "16", "--iterations", "4", "--batch-size", "4", "--device", "cpu")

Call = Callable[..., Any]


def blocks(page: Path, language: str = "") -> Iterator[str]:
    """Yield the blocks of code of a page that are in a language; without one, what is typed into a shell."""
    for named, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if named == language:
            yield block


def commands() -> list[tuple[str, str]]:
    """Return every command that a page or the head of a spec has on a line of its own, with where it is."""
    lines = [(page, line) for page in PAGES for block in blocks(page) for line in block.splitlines()]
    lines += [(spec, line) for spec in SPECS for line in spec.read_text(encoding="utf-8").splitlines()[:3]]
    found = [(path, COMMAND.fullmatch(line)) for path, line in lines]
    return [(str(path.relative_to(ROOT)), match[1]) for path, match in found if match]


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_a_command_of_the_pages_is_one_and_has_these_options(page: str, command: str) -> None:
    found, name, words = typer.main.get_command(app), "vicinal", words_of(command)
    while hasattr(found, "commands"):
        name, *words = words
        assert name in found.commands, page
        found = found.commands[name]
    found.make_context(name, words)  # raises for an option that is not there, or a value that is none of it


def test_the_commands_are_found_where_they_stand() -> None:
    found = {page for page, _ in commands()}
    assert {"README.md", "docs/bench.md", "results/digits/README.md", "benchmarks/pacs.toml"} <= found
    assert sum(page == "README.md" for page, _ in commands()) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.fixture
def walked(vicinal: Call, domains: Path, tmp_path: Path) -> Path:
    """Return where somebody has typed what the README says of own data, with hardly any training."""
    (domains / "light").rename(domains / "hospital_c")
    domains.rename(tmp_path / "photos")
    (tmp_path / "photos" / "hospital_c" / "left").rename(tmp_path / "new_images")
    (tmp_path / "photos" / "hospital_c" / "left").symlink_to(tmp_path / "new_images")
    steps = [words_of(match[1]) for match in map(COMMAND.fullmatch, own_data()) if match]
    assert [step[0] for step in steps] == ["train", "evaluate", "adapt"]
    for step in steps:
        ran = vicinal(*shrunk(step))
        assert ran.code == 0, ran.err
    return tmp_path


def own_data() -> list[str]:
    (block,) = (block for block in blocks(README) if "vicinal train photos" in block)
    return block.splitlines()


def shrunk(step: Sequence[str]) -> list[str]:
    """Return a step of the README on a net that trains in a moment."""
    if step[0] != "train":
        return [*step, "--device", "cpu"]
    asked = list(step)
    del asked[asked.index("--backbone") :][:2]
    return [*asked, *TINY]


def test_the_readme_walks_from_own_images_to_predictions_and_its_code_runs(walked: Path) -> None:
    lines = (walked / "adapted" / "predictions.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + len(list((walked / "new_images").iterdir()))
    pieces = list(blocks(README, "python"))
    assert len(pieces) == 3
    batch = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    names: dict[str, Any] = {"batch": batch, "any_classifier": nn.Sequential(body, nn.Linear(4, 2))}
    for piece in pieces:
        exec(compile(piece, str(README), "exec"), names)
    assert names["found"].label.shape == (6,)
    assert names["plain"](batch).shape == (6, 2)
    assert (walked / "stream.safetensors").exists()
