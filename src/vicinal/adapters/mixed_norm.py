"""BatchNorm on running statistics mixed with the batch's, where a method's own paper says so."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


@contextmanager
def mixed_norm(model: nn.Module, weight: float, *, keep: bool) -> Iterator[None]:
    """Let passes run on (1 - weight) running + weight batch moments.

    With `keep` the mixture becomes the running moments and gradients flow through the batch's part (RoTTA);
    without it nothing is stored and the mixture is a constant (MEMO).
    """
    layers = batch_norms(model)
    # On the instance and only for the pass: the model stays one of plain layers, to be copied and exported.
    for layer in layers:
        layer.__dict__["forward"] = partial(_mixed, layer, weight, keep)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def _mixed(layer: _BatchNorm, weight: float, keep: bool, x: Tensor) -> Tensor:
    running = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
    places = [dim for dim in range(x.ndim) if dim != 1]
    variance, mean = torch.var_mean(x if keep else x.detach(), dim=places, correction=0)
    mean, variance = torch.lerp(running[0], mean, weight), torch.lerp(running[1], variance, weight)
    if not keep:
        return batch_norm(x, mean, variance, layer.weight, layer.bias, False, 0.0, layer.eps)
    running[0].copy_(mean.detach())
    running[1].copy_(variance.detach())
    shape = [1, -1] + [1] * (x.ndim - 2)
    y = (x - mean.view(shape)) * torch.rsqrt(variance + layer.eps).view(shape)
    return y if layer.weight is None else y * layer.weight.view(shape) + layer.bias.view(shape)
