"""BatchNorm layers that run another way for one pass, whatever else their class does.

While it runs, a layer reads its scale, its shift and its running moments by name. For one pass others lie
under these names, on the instance: a layer whose class also activates (many of timm's) goes on doing so, and
the model stays one of plain layers, to be copied and exported.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vicinal.functional.normalization import Moments, moments_of, renormalization

# From a layer's position and its input: the tensors it runs with in place of its own.
Lent = dict[str, Tensor | None]
Instead = Callable[[int, Tensor], Lent]


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


@contextmanager
def running(
    layers: Sequence[_BatchNorm], instead: Instead | None = None, *, on_batch: bool
) -> Iterator[None]:
    """Let every layer run a pass on the batch's statistics or on the running ones, with other tensors."""
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            layer.train(on_batch)
            stack.callback(layer.eval)
            if instead is None:
                continue
            stack.callback(_take_back, layer)  # after an interruption as well
            stack.callback(layer.register_forward_pre_hook(_lend(instead, index)).remove)
            # Called after a pass that failed as well: the layer may be used again in it.
            stack.callback(layer.register_forward_hook(_take_back, always_call=True).remove)
        yield


def _lend(instead: Instead, index: int) -> Callable[[_BatchNorm, tuple[Any, ...]], None]:
    def lend(layer: _BatchNorm, inputs: tuple[Any, ...]) -> None:
        layer.__dict__.update(instead(index, inputs[0]))

    return lend


def _take_back(layer: _BatchNorm, *_: Any) -> None:
    for name in ("weight", "bias", "running_mean", "running_var"):
        layer.__dict__.pop(name, None)


def renormalized(layer: _BatchNorm, r: Tensor, d: Tensor) -> Lent:
    """Return what makes batch normalization put out scale (x_b r + d) + shift: another scale and shift.

    And no running moments, which a pass on the batch would hold on to until its gradient is taken.
    """
    if layer.weight is not None:
        r, d = (layer.weight * value.to(layer.weight.dtype) for value in (r, d))
    shift = d if layer.bias is None else d.to(layer.bias.dtype) + layer.bias
    return {"weight": r, "bias": shift, "running_mean": None, "running_var": None}


@contextmanager
def mixed_norm(model: nn.Module, weight: float, *, keep: bool) -> Iterator[None]:
    """Let passes run on (1 - weight) running + weight batch moments.

    With `keep` the mixture becomes the running moments and gradients flow through the batch's part (RoTTA);
    without it nothing is stored and the mixture is a constant (MEMO).
    """
    layers = batch_norms(model)
    kept: dict[int, tuple[tuple[Tensor, Tensor], list[Tensor]]] = {}

    def mixture(index: int, x: Tensor) -> Lent:
        layer = layers[index]
        stored = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
        batch = moments_of(x, constant=not keep)
        mixed = Moments(
            *(torch.lerp(old, new.to(old), weight) for old, new in zip(stored, batch, strict=True))
        )
        kept[index] = stored, [value.detach() for value in mixed]
        if keep and x.numel() > x.shape[1]:
            return renormalized(layer, *renormalization(batch, mixed, layer.eps))
        layer.eval()  # one value a channel has no statistics of its own
        return {"running_mean": mixed.mean, "running_var": mixed.variance}

    with running(layers, mixture, on_batch=keep):
        yield
    for old, new in kept.values() if keep else ():
        torch._foreach_copy_(list(old), new)
