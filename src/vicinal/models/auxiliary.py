"""Auxiliary heads on the features, trained beside the classifier; they travel in `Trained.extras`."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

ROTATIONS = 4
PROJECTION = 128  # as in SimCLR and in the code of TTT++

M = TypeVar("M", bound=nn.Module)


def rotation_head(num_features: int) -> nn.Linear:
    """Return a linear head that tells by how many quarter turns an image was rotated."""
    return nn.Linear(num_features, ROTATIONS)


def projection_head(num_features: int, size: int = PROJECTION) -> nn.Sequential:
    """Return the two-layer head whose output the contrastive loss compares."""
    return nn.Sequential(nn.Linear(num_features, num_features), nn.ReLU(), nn.Linear(num_features, size))


def as_extras(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    """Return a module's tensors under names of their own, cut off from it."""
    return {f"{prefix}.{name}": value.detach().clone() for name, value in module.state_dict().items()}


def part_of(extras: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors under a prefix, without it."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in extras.items() if name.startswith(start)}


def filled(build: Callable[[], M], weights: Mapping[str, Tensor], like: Tensor) -> M:
    """Return a module with copies of these weights, of the type and on the device of a tensor."""
    with torch.device("meta"):  # no first weights are drawn: nobody's random numbers change
        module = build()
    # assign=True turns the copies into the parameters.
    module.load_state_dict({name: value.to(like, copy=True) for name, value in weights.items()}, assign=True)
    return module
