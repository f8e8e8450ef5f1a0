import pytest
import torch
from torch import Tensor

from vicinal.models.backbones import build_classifier, preprocessing_for

State = dict[str, Tensor]


@pytest.fixture
def state() -> State:
    """Return the features of a small net, every tensor random, counters too."""
    generator = torch.Generator().manual_seed(0)
    shapes = build_classifier("small", 4, preprocessing=preprocessing_for("small")).features.state_dict()
    return {
        name: torch.rand(value.shape, generator=generator) if value.is_floating_point() else torch.tensor(7)
        for name, value in shapes.items()
    }
