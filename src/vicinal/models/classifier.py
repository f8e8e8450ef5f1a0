"""The classifier: normalization, features and a linear head, theta_s of the paper."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vicinal.types import Head

PRECISIONS = ("float32", "bfloat16")  # what features can be computed in
State = dict[str, Tensor]
Constants = tuple[Tensor, Tensor]  # mean and standard deviation of each channel
Run = Callable[[nn.Module, Tensor, Constants, State | None], Tensor]


def as_written(features: nn.Module, x: Tensor, constants: Constants, state: State | None) -> Tensor:
    """Return the features of images in [0, 1], normalized, under other weights and buffers if given."""
    mean, std = constants
    normal = (x - mean) / std
    z: Tensor = features(normal) if state is None else functional_call(features, state, (normal,))
    return z


@cache
def fused() -> Run:
    """Return the same compiled: normalization, activation and sums between products in one kernel each."""
    return torch.compile(as_written, dynamic=False)


def computing_in(precision: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Return a block that computes in a precision; None leaves that to whoever has called."""
    if precision is None:
        return nullcontext()
    # Without its cache: weights change between passes, and none is used twice in one.
    return torch.autocast(device.type, precision, cache_enabled=False)


class Classifier(nn.Module):
    """Maps images in [0, 1] to logits: head(features(normalize(x))).

    Normalization constants are buffers of the model, so that whoever holds the model feeds it plain images
    and cannot pair it with another model's constants.
    """

    mean: Tensor
    std: Tensor
    # What the features are computed in, if not in the precision of their weights; head and losses never are.
    precision: torch.dtype | None = None
    # Whether gradients of the features are taken through compiled code; passes without them never are.
    compiled: bool = False

    def __init__(
        self, features: nn.Module, num_features: int, num_classes: int, mean: list[float], std: list[float]
    ) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Linear(num_features, num_classes)
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def embed(self, x: Tensor, state: State | None = None) -> Tensor:
        """Return the features z (N, d) of images in [0, 1], under other weights and buffers if given."""
        with computing_in(self.precision, x.device):
            return self._run(x, state).to(x.dtype)

    def _run(self, x: Tensor, state: State | None) -> Tensor:
        given = (self.features, x, (self.mean, self.std), state)
        if not (self.compiled and torch.is_grad_enabled()):
            return as_written(*given)
        try:
            return fused()(*given)
        except torch._dynamo.exc.TorchDynamoException as error:
            self.compiled = False
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"the net could not be compiled and runs as written: {why}", stacklevel=2)
            return as_written(*given)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, C) of images in [0, 1]."""
        logits: Tensor = self.head(self.embed(x))
        return logits

    def features_and_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return z (N, d) and logits (N, C) from one pass."""
        z = self.embed(x)
        return z, self.head(z)

    @property
    def channels(self) -> int | None:
        """How many channels images must have."""
        return self.mean.shape[1]

    @property
    def has_features(self) -> bool:
        """Whether z can be had."""
        return True

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the head."""
        return list(self.head.parameters())

    @property
    def linear(self) -> Head:
        """The rows and bias of the head, cut off from the graph."""
        return Head(self.head.weight.detach(), self.head.bias.detach())
