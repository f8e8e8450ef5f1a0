"""What a learner makes of the model it is given."""

import pytest
import torch
from torch import nn

from vicinal.models.backbones import build_classifier
from vicinal.models.classifier import Classifier
from vicinal.models.pooling import FusedMaxPool2d
from vicinal.training.algorithms.erm import ERM
from vicinal.training.config import TrainConfig
from vicinal.training.learner import Stage, make_learner
from vicinal.training.train import ModelSpec

CONFIG = TrainConfig(algorithm="erm", batch_size=6)


def linear(model: Classifier, config: TrainConfig) -> nn.Module:
    return nn.Linear(2, 2)  # Adam wants something to train


FIXED = Stage("fixed", ERM.drawing, ERM.step, fixed_model=True, auxiliary=linear)


def pools_after(spec: ModelSpec, stage: Stage, device: str) -> set[type[nn.Module]]:
    """Return the classes of a model's max pooling once a learner has it."""
    model: Classifier = build_classifier("small", 2, preprocessing=spec.preprocessing).to(device)
    names = list(model.state_dict())
    make_learner(model, None, stage, CONFIG, seed=0)
    assert list(model.state_dict()) == names
    return {type(layer) for layer in model.modules() if isinstance(layer, nn.MaxPool2d)}


def test_on_a_cpu_pooling_is_torchs(spec: ModelSpec) -> None:
    assert pools_after(spec, ERM, "cpu") == {nn.MaxPool2d}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_pooling_is_fused_where_the_model_is_trained(spec: ModelSpec) -> None:
    assert pools_after(spec, ERM, "cuda") == {FusedMaxPool2d}
    assert pools_after(spec, FIXED, "cuda") == {nn.MaxPool2d}
