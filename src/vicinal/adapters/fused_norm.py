"""One BatchNorm layer on an average that takes its batch in: on a GPU two kernels, and two for the gradient.

As written the layer's own forward runs on what is lent to it. The moments, the bookkeeping, scale and shift
and the normalization are then kernels of their own, some eight forward and five backward, and a net of many
layers on a small batch does little but start them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from vicinal.adapters import norm_kernels
from vicinal.adapters.bookkeeping import averaged, renormalization_to
from vicinal.adapters.layers import Lent, normalized_by, patched, renormalized
from vicinal.adapters.norm_kernels import Done, Given, Held, Kernels
from vicinal.functional.normalization import Moments, moments_of
from vicinal.kernels import suited


def on_average(
    layer: _BatchNorm,
    x: Tensor,
    average: Moments,
    share: Tensor,
    before: Moments | None = None,
    *,
    rectify: bool = False,
) -> tuple[Lent | Tensor, Moments, Moments]:
    """Return what makes a layer run on the average with the batch in it; the batch's moments; that average.

    To the gradient the average is a constant. See `averaged`. An output in its place, and only that, is
    rectified where that is asked for.
    """
    # The kernels' gradient would be that of batch statistics.
    kernels = None if torch.is_grad_enabled() else _kernels_for(layer, x, *average, share, *(before or ()))
    if kernels is not None:
        given = Given(layer.weight, layer.bias, layer.eps, average, share, before, rectify)
        return norm_kernels.forward(kernels, x, given)
    batch = moments_of(x)
    new = averaged(average, batch, share, before)
    return normalized_by(new), batch, new


def renormalizing(
    layer: _BatchNorm, x: Tensor, average: Moments, share: Tensor, *, rectify: bool = False
) -> tuple[Lent | Tensor, Moments]:
    """Return what makes a layer run as on that average; the batch's moments.

    The gradient is that of batch statistics. See `renormalization_to`. As with `on_average` an output in its
    place may be rectified.
    """
    kernels = _kernels_for(layer, x, *average, share)
    if kernels is not None:
        given = Given(layer.weight, layer.bias, layer.eps, average, share, rectify=rectify)
        with torch.no_grad():
            done = norm_kernels.forward(kernels, x, given)
        return _Renormalized.apply(x, layer.weight, layer.bias, kernels, given, done), done.batch
    batch = moments_of(x)
    return renormalized(layer, *renormalization_to(average, batch, share, layer.eps)), batch


class _Renormalized(torch.autograd.Function):
    """What a layer has put out on an average, with the gradient of batch renormalization."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, kernels: Kernels, given: Given, done: Done
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, *done.batch, *done.average)
        ctx.kernels, ctx.eps, ctx.rectified = kernels, given.eps, given.rectify
        return done.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *moments = ctx.saved_tensors
        batch, average = Moments(*moments[:2]), Moments(*moments[2:])
        held = Held(x, weight, bias, ctx.eps, batch, average, ctx.rectified)
        wanted = ctx.needs_input_grad[:3]
        slopes = norm_kernels.backward(ctx.kernels, dy, held, of_x=wanted[0])
        named = (value if wants else None for value, wants in zip(slopes, wanted, strict=True))
        return *named, None, None, None


def _kernels_for(layer: _BatchNorm, x: Tensor, *values: Tensor) -> Kernels | None:
    """Return the kernels if they can run this layer on this input, else None: it then runs as written."""
    # Another class, or somebody's own forward, may do more than normalize.
    if type(layer) is not nn.BatchNorm2d or patched(layer) or torch.is_autocast_enabled("cuda"):
        return None
    if layer.weight is None or layer.bias is None or x.dim() != 4 or x.shape[1] != layer.num_features:
        return None
    rows = x.detach().permute(0, 2, 3, 1)  # in one piece where channels lie side by side
    fits = 0 < x.numel() <= norm_kernels.MOST_VALUES and suited(rows, layer.weight, layer.bias, *values)
    return norm_kernels.kernels_of(x.device.index) if fits else None
