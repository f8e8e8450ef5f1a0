"""Any classifier as features and a head: found by itself, or named by whoever brings the model."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vicinal.errors import AdapterError, CopyError, LayersError, UnknownNameError
from vicinal.models.classifier import computing_in
from vicinal.types import Head

M = TypeVar("M", bound=nn.Module)
# What torchvision, timm and most others call their last layer.
HEAD_NAMES = ("fc", "head.fc", "heads.head", "head", "classifier", "last_linear", "linear", "_fc")


class Wrapped(nn.Module):
    """A model that somebody brings, with its features z and its linear head where it has them.

    It is fed as its owner feeds it: no normalization is added.
    """

    # What the model computes in, if not in the precision of its weights.
    precision: torch.dtype | None = None

    def __init__(self, net: nn.Module, features: str | None = None, head: str | None = None) -> None:
        super().__init__()
        self.net = unwrapped(net)
        self.head_name = _known(self.net, "head", head) if head else find_head(self.net)
        self.features_name = _known(self.net, "features", features) if features else None
        self.guessed = not (features or head)
        self.dispensable = False  # whether a guess that does not fit may pass for a model without features

    @property
    def channels(self) -> int | None:
        """How many channels images must have; None where the model does not say."""
        layer = next((m for m in self.net.modules() if isinstance(m, nn.Conv2d)), None)
        return None if layer is None else layer.in_channels

    @property
    def has_features(self) -> bool:
        """Whether z can be had: by a named layer, or as what the head is fed."""
        return self.features_name is not None or self.head_name is not None

    @property
    def linear(self) -> Head:
        """The rows and bias of the head, cut off from the graph."""
        layer = self.net.get_submodule(self.head_name) if self.head_name else None
        if not isinstance(layer, nn.Linear):
            raise LayersError(
                "this method needs the model's linear classifier and found none: "
                "name its last nn.Linear, as in adapt(model, method, head='classifier.3')"
            )
        weight = layer.weight.detach()
        bias = torch.zeros(len(weight)).to(weight) if layer.bias is None else layer.bias.detach()
        return Head(weight, bias)

    def head(self, z: Tensor) -> Tensor:
        """Return the logits of features."""
        self.linear  # noqa: B018  raises, saying what to pass, where there is none
        assert self.head_name is not None
        logits: Tensor = self.net.get_submodule(self.head_name)(z)
        return logits

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the head; none where there is no head."""
        return list(self.net.get_submodule(self.head_name).parameters()) if self.head_name else []

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, C)."""
        with computing_in(self.precision, x.device):
            logits = logits_of(self.net(x))
        return logits if self.precision is None else logits.to(x.dtype)

    def features_and_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return z (N, d) and logits (N, C) from one pass; z is empty (N, 0) where the model has none."""
        seen: list[Tensor] = []
        with self._watched(seen.append):
            logits = self(x)
        if not self.has_features:
            return logits.new_zeros(len(logits), 0), logits
        z = seen[-1] if seen else None
        if z is None or z.ndim != 2 or len(z) != len(logits) or not self._is_fed(z, logits):
            if self.guessed and self.dispensable:
                return logits.new_zeros(len(logits), 0), logits
            shape = "nothing" if z is None else tuple(z.shape)
            raise AdapterError(
                f"features of shape (N, d) were expected at '{self.features_name or self.head_name}', "
                f"found {shape}: name another layer with features= or head="
            )
        return (z if self.precision is None else z.to(logits.dtype)), logits

    def _is_fed(self, z: Tensor, logits: Tensor) -> bool:
        """Say whether z and logits have the shapes of the head between them; a named layer is trusted."""
        if self.features_name is not None or self.head_name is None:
            return True
        layer = self.net.get_submodule(self.head_name)
        return not isinstance(layer, nn.Linear) or layer.weight.shape == (logits.shape[1], z.shape[1])

    @contextmanager
    def _watched(self, see: Callable[[Tensor], None]) -> Iterator[None]:
        """See what comes out of the features layer, or what the head is fed, while a pass runs."""
        # Put on for each pass: a hook that stayed would still see into this model from its copies.
        if self.features_name is not None:
            layer = self.net.get_submodule(self.features_name)
            handle = layer.register_forward_hook(lambda _, __, output: see(output))
        elif self.head_name is not None:
            layer = self.net.get_submodule(self.head_name)
            handle = layer.register_forward_pre_hook(lambda _, inputs: see(inputs[0]))
        else:
            yield
            return
        try:
            yield
        finally:
            handle.remove()


def unwrapped(net: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's and DataParallel's wrappers."""
    inner: Any = net
    while True:
        if isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        else:
            break
    assert isinstance(inner, nn.Module)
    return inner


def copied(model: M, memo: dict[int, Any] | None = None) -> M:
    """Return a deep copy of a model; raise in one line where it holds a tensor that was computed."""
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise CopyError(
            f"this model cannot be copied ({str(error).partition('.')[0]}): take weight_norm and "
            "spectral_norm from torch.nn.utils.parametrizations, or pass inplace=True to a method that needs "
            "no second model"
        ) from None


def cuts_gradients(model: nn.Module, x: Tensor) -> bool:
    """Say whether a model gives logits that do not depend on its images, as far as gradients know."""
    try:
        with torch.enable_grad():
            return not model(x.detach().clone().requires_grad_()).requires_grad
    except RuntimeError:  # it fails for another reason
        return False


def find_head(net: nn.Module) -> str | None:
    """Return the name of the last linear layer, by its usual names first; None if there is none."""
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}
    for name in HEAD_NAMES:
        inside: list[str] = [found for found in layers if found == name or found.startswith(f"{name}.")]
        if inside:
            return inside[-1]
    names: list[str] = list(layers)
    return names[-1] if names else None


def logits_of(output: Any) -> Tensor:
    """Return the logits in what a model returns: a tensor, `.logits`, ["logits"], or the first of several."""
    named = output.get("logits", output) if isinstance(output, Mapping) else output
    found = getattr(named, "logits", named)
    if isinstance(found, list | tuple) and found:
        found = found[0]
    if not isinstance(found, Tensor) or found.ndim != 2:
        kind = tuple(found.shape) if isinstance(found, Tensor) else type(output).__name__
        raise AdapterError(f"the model must return logits (N, C), it returned {kind}")
    return found


def _known(net: nn.Module, what: str, name: str) -> str:
    names = [found for found, _ in net.named_modules() if found]
    if name not in names:
        raise UnknownNameError(f"{what} layer", name, names)
    return name
