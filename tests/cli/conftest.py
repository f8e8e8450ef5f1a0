"""The command, run in this process, on tiny models and a tiny folder of domains."""

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vicinal.benchmarks.prepare import TrainRequest, prepare_training
from vicinal.checkpoint import Trained
from vicinal.cli import main
from vicinal.data.domains import assign_roles
from vicinal.data.load import load_dataset
from vicinal.data.splits import STORED
from vicinal.models.backbones import preprocessing_for
from vicinal.training.config import OutOfFoldConfig, TrainConfig
from vicinal.training.train import ModelSpec, train

SIZE = 16
LESSONS = OutOfFoldConfig(stream_images=40, epochs=3, step_sizes=(1e-3,), baselines=())


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """Return the one line of a refusal; anything else is a failure of the test."""
        assert self.code == 2, (self.code, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("vicinal: "), lines
        return lines[0]


Command = Callable[..., Ran]


@pytest.fixture
def vicinal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Return a caller of the command; relative paths land in this test's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("vicinal.cli.out.width", 200)  # rich read COLUMNS when the console was made
    monkeypatch.setenv("TERMINAL_WIDTH", "200")

    def call(*words: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["vicinal", *map(str, words)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    return call


def picture(label: int, shade: int, rng: np.random.Generator) -> Image.Image:
    """Return noise, brighter on the left in class 0 and on the right in class 1."""
    pixels = rng.integers(0, 60, (SIZE, SIZE, 3)) + shade
    half = slice(0, SIZE // 2) if label == 0 else slice(SIZE // 2, None)
    pixels[:, half] += 80
    return Image.fromarray(pixels.astype(np.uint8))


def make_domains(root: Path, counts: dict[str, int]) -> Path:
    """Write a folder of domains of two classes, each domain with its own number of images a class."""
    rng = np.random.default_rng(0)
    for position, (domain, count) in enumerate(counts.items()):
        for label, name in enumerate(("left", "right")):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for index in range(count):
                picture(label, 40 * position, rng).save(folder / f"{index}.png")
    return root


@pytest.fixture
def domains_of(tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of domain folders from images a class: domains_of(dark=3, light=4)."""
    return lambda **counts: make_domains(tmp_path / "own", counts)


@pytest.fixture(scope="session")
def shared_domains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of four domains that no test changes."""
    return make_domains(
        tmp_path_factory.mktemp("data") / "shades", {"dark": 10, "dim": 10, "light": 10, "mid": 10}
    )


@pytest.fixture
def domains(shared_domains: Path, tmp_path: Path) -> Path:
    """Return a folder of four domains of one's own, as if nobody had looked at it yet."""
    unseen = shutil.ignore_patterns(STORED.name)
    return Path(shutil.copytree(shared_domains, tmp_path / "shades", ignore=unseen))


@pytest.fixture(scope="session")
def models(shared_domains: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a tiny run of each algorithm on the domains, `light` held out."""
    root = tmp_path_factory.mktemp("models")
    made = {}
    for algorithm in ("erm", "neighbor", "meta"):
        options = {"algorithm": algorithm, "iterations": 6, "batch_size": 4}
        asked = TrainRequest(str(shared_domains), ("light",), "small", size=SIZE, training=options)
        ready = prepare_training(asked)
        made[algorithm] = root / algorithm
        train(
            ready.spec,
            ready.roles.sources,
            ready.config,
            LESSONS,
            folder=made[algorithm],
            provenance=ready.provenance,
        )
    return made


@pytest.fixture
def model(models: dict[str, Path], tmp_path: Path) -> Path:
    """Return the folder of a run of one's own, `meta` with phi and a chosen rule."""
    return Path(shutil.copytree(models["meta"], tmp_path / "run"))


@pytest.fixture(scope="session")
def digits_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny run on digits."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    roles = assign_roles(load_dataset("digits"), ("0", "90"))
    spec = ModelSpec("small", "none", preprocessing_for("small", channels=1), roles.classes)
    train(
        spec,
        roles.sources,
        TrainConfig(iterations=12, batch_size=10),
        LESSONS,
        folder=folder,
        provenance={"dataset": "digits", "targets": ["0", "90"]},
    )
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Iterator[Callable[[], dict[str, bytes]]]:
    """Return a taker of everything in this test's folder, by path, to show that nothing was written."""

    def take() -> dict[str, bytes]:
        found = sorted(tmp_path.rglob("*"))
        return {
            str(path.relative_to(tmp_path)): path.read_bytes() if path.is_file() else b"" for path in found
        }

    return take


@pytest.fixture
def same_tensors() -> Callable[[Trained, Trained], bool]:
    """Return whether two models and their nets are equal bit for bit."""

    def same(one: Trained, other: Trained) -> bool:
        for part in ("model", "phi", "anchor_phi", "predict_phi"):
            a, b = getattr(one, part), getattr(other, part)
            if (a is None) != (b is None):
                return False
            if a is not None:
                left, right = a.state_dict(), b.state_dict()
                if left.keys() != right.keys() or not all(torch.equal(left[k], right[k]) for k in left):
                    return False
        return True

    return same
