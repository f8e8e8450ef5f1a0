"""BatchNorm layers that run another way for one pass, whatever else their class does.

While it runs, a layer reads its scale, its shift and its running moments by name. For one pass others lie
under these names, on the instance: a layer whose class also activates (many of timm's) goes on doing so, and
the model stays one of plain layers, to be copied and exported. Who knows all that a class does may put out in
its place.

`running` is the one way to set a pass up, in training too. What a layer is lent says what it runs on:

| lent            | values by            | gradient            | for                               |
|-----------------|----------------------|---------------------|-----------------------------------|
| nothing         | the batch or buffers | as the layer has it | batch and source statistics, TTT  |
| `normalized_by` | any moments          | they are constants  | predictions on averages, MEMO     |
| `renormalized`  | any moments          | the batch's own     | updates on averages, DELTA, RoTTA |

Which moments these are stays with each method, for no two have the same: of variances or of deviations
(DELTA), with the distance between means as spread or without (MEMO, RoTTA), with this batch or before it
(DELTA), constants to the gradient or not (RoTTA), kept after the pass, the step (DELTA) or never (MEMO).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vicinal.functional.normalization import Moments, moments_of, renormalization

Lent = dict[str, Tensor | None]  # what a layer runs with in place of its own tensors
# From a layer's position and its input: what is lent to it, or all that it would put out.
Instead = Callable[[int, Tensor], Lent | Tensor]
# What lies on the instance: while a layer runs, and for a whole pass.
LENT = ("weight", "bias", "running_mean", "running_var")
SET = ("forward", "track_running_stats")


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def running_moments(layer: _BatchNorm) -> Moments:
    """Return the buffers themselves, to be read or written."""
    return Moments(layer.get_buffer("running_mean"), layer.get_buffer("running_var"))


@contextmanager
def running(
    layers: Sequence[_BatchNorm], instead: Instead | None = None, *, on_batch: bool
) -> Iterator[None]:
    """Let every layer run a pass on the batch's statistics or on the running ones, with other tensors."""
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            own = {name: layer.__dict__[name] for name in SET if name in layer.__dict__}
            stack.callback(_restore, layer, own, layer.training)
            layer.train(on_batch)
            if on_batch:
                # Nothing is stored and no batches are counted: on a GPU the count is a kernel a layer.
                layer.track_running_stats = False
            if instead is not None:
                layer.__dict__["forward"] = _forward(layer, instead, index)
        yield


def _forward(layer: _BatchNorm, instead: Instead, index: int) -> Callable[..., Tensor]:
    """Return what a layer runs for one pass: its own forward on what is lent to it, or nothing of its own."""
    as_written = layer.forward

    @wraps(as_written)
    def forward(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        given = instead(index, x)
        if isinstance(given, Tensor):
            return given
        layer.__dict__.update(given)
        try:
            return as_written(x, *rest, **named)
        finally:  # the layer may be used again in this pass
            _take_back(layer)

    return forward


def patched(layer: _BatchNorm) -> bool:
    """Say whether a forward of somebody's own lies on this very layer, perhaps beneath that of a pass."""
    return getattr(unwrap(layer.forward), "__func__", None) is not type(layer).forward


def _take_back(layer: _BatchNorm) -> None:
    for name in LENT:
        layer.__dict__.pop(name, None)


def _restore(layer: _BatchNorm, own: dict[str, Any], training: bool) -> None:
    """Leave a layer as a pass has found it; after an interruption as well."""
    _take_back(layer)
    for name in SET:
        layer.__dict__.pop(name, None)
    layer.__dict__.update(own)
    layer.train(training)


def normalized_by(moments: Moments) -> Lent:
    """Return what makes a layer in evaluation mode run on these moments."""
    return {"running_mean": moments.mean, "running_var": moments.variance}


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
    kept: dict[int, list[Tensor]] = {}

    def mixture(index: int, x: Tensor) -> Lent:
        layer = layers[index]
        old, batch = running_moments(layer), moments_of(x, constant=not keep)
        mixed = Moments(*(torch.lerp(a, b.to(a), weight) for a, b in zip(old, batch, strict=True)))
        kept[index] = [value.detach() for value in mixed]
        if keep and x.numel() > x.shape[1]:
            return renormalized(layer, *renormalization(batch, mixed, layer.eps))
        layer.eval()  # one value a channel has no statistics of its own
        return normalized_by(mixed)

    with running(layers, mixture, on_batch=keep):
        yield
    for index, mixed in kept.items() if keep else ():
        torch._foreach_copy_(list(running_moments(layers[index])), mixed)
