from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vicinal.checkpoint import Trained
from vicinal.data.domains import LabelledImages, SourceDomain
from vicinal.models.backbones import preprocessing_for
from vicinal.training.progress import Silent, StopRequest
from vicinal.training.train import ModelSpec, Run

MakeSources = Callable[..., list[SourceDomain]]
SIZE = 8


def labelled(count: int, shade: int, generator: torch.Generator) -> LabelledImages:
    """Return noisy images whose left half is brighter in class 0 and whose right half is in class 1."""
    labels = torch.arange(count) % 2
    images = torch.randint(0, 120, (count, 1, SIZE, SIZE), generator=generator) + shade
    images[labels == 0, :, :, : SIZE // 2] += 15
    images[labels == 1, :, :, SIZE // 2 :] += 15
    return LabelledImages(images.to(torch.uint8), labels)


@pytest.fixture(scope="session")
def make_sources() -> MakeSources:
    """Return a maker of two-class domains that differ in brightness."""

    def make(domains: int = 3, train: int = 24, val: int = 8, seed: int = 0) -> list[SourceDomain]:
        generator = torch.Generator().manual_seed(seed)
        return [
            SourceDomain(
                f"d{index}",
                labelled(train, 30 * index, generator),
                labelled(val, 30 * index, generator),
            )
            for index in range(domains)
        ]

    return make


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    """Return the small net on the images of `make_sources`."""
    return ModelSpec("small", "none", preprocessing_for("small", channels=1, size=SIZE), ("left", "right"))


@dataclass
class Halt(Silent):
    """Asks to stop once `done` steps of `task` are behind."""

    stop: StopRequest
    task: str
    after: int
    current: str = ""

    def start(self, task: str, total: int, done: int = 0) -> None:
        self.current = task

    def advance(self, done: int, terms: Mapping[str, float], images_per_second: float | None = None) -> None:
        if self.current == self.task and done >= self.after:
            self.stop.asked = True


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run() -> MakeRun:
    """Return a maker of runs; `halt=(task, after)` stops one there."""

    def make(folder: Path | None = None, *, resume: bool = False, halt: tuple[str, int] | None = None) -> Run:
        stop = StopRequest()
        progress = Silent() if halt is None else Halt(stop, *halt)
        return Run(folder, progress, stop, torch.device("cpu"), resume)

    return make


TensorsOf = Callable[[Trained], dict[str, Tensor]]


@pytest.fixture(scope="session")
def tensors_of() -> TensorsOf:
    """Return a function that gives every tensor a training has left behind, by name."""

    def collect(trained: Trained) -> dict[str, Tensor]:
        nets = {part: getattr(trained, part) for part in ("model", "phi", "anchor_phi", "predict_phi")}
        return {
            f"{part}.{name}": value.clone()
            for part, net in nets.items()
            if net is not None
            for name, value in net.state_dict().items()
        }

    return collect


SameTensors = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], bool]


@pytest.fixture(scope="session")
def same_tensors() -> SameTensors:
    """Return a function that says whether two sets of tensors are equal bit for bit."""

    def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    return same
