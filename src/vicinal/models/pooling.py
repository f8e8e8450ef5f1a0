"""Max pooling on a GPU by kernels of its own; everywhere else it is torch's."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from vicinal.models import pool_kernels
from vicinal.models.pool_kernels import Geometry, Pool, empty_outputs, lanes_of

DEVICE = "cuda"
MOST_VALUES = 2**30  # whose places the kernels can count


class FusedMaxPool2d(nn.MaxPool2d):
    """Max pooling in one kernel, and one for its gradient, where they can run; torch's everywhere else."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the largest value of every window."""
        geometry, y = geometry_of(self), None
        if geometry is not None and suited(x, geometry):
            if torch.compiler.is_compiling():
                y = _compiled(x, geometry)
            elif (pool := pool_for(x, geometry)) is not None:
                y = _Pooled.apply(x, pool) if trains(x) else pool.pooled(x, keep=False)[0]
        return super().forward(x) if y is None else y


def fuse_pools(model: nn.Module) -> None:
    """Make every plain max pooling of a model one that runs in few kernels."""
    for module in model.modules():
        if type(module) is nn.MaxPool2d and geometry_of(module) is not None:
            module.__class__ = FusedMaxPool2d  # which has nothing more; hooks and whoever holds it stay


class _Pooled(torch.autograd.Function):
    """Max pooling that keeps a byte for every output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pool: Pool) -> Tensor:
        y, places = pool.pooled(x)
        ctx.save_for_backward(places)
        ctx.pool, ctx.shape = pool, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return _Spread.apply(dy, places, ctx.shape, ctx.pool), None


class _Spread(torch.autograd.Function):
    """The gradient of max pooling. It is linear: its own gradient reads what lies at the places."""

    @staticmethod
    def forward(ctx: Any, dy: Tensor, places: Tensor, shape: torch.Size, pool: Pool) -> Tensor:
        ctx.save_for_backward(places)
        ctx.geometry = pool.geometry
        return pool.spread(dy, places, shape)

    @staticmethod
    def backward(ctx: Any, ddx: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return taken(ddx, places, ctx.geometry), None, None, None


def taken(values: Tensor, places: Tensor, geometry: Geometry) -> Tensor:
    """Return for every window what an image has at the place that the window took."""
    at = positions(places, values.shape, geometry)
    return values.flatten(2).gather(2, at.flatten(2)).view(at.shape)


def positions(places: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """Return where in its image each place of a window lies, counted row by row."""
    (top, left), place = corners(places, geometry), places.long()
    return (top + place // geometry.wide) * shape[3] + left + place % geometry.wide


def corners(windows: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return row and column of the first place of every window."""
    rows, columns = windows.shape[2:]
    top = torch.arange(rows, device=windows.device).unsqueeze(-1) * geometry.down - geometry.above
    left = torch.arange(columns, device=windows.device) * geometry.across - geometry.before
    return top, left


def _compiled(x: Tensor, geometry: Geometry) -> Tensor | None:
    """Return what is pooled, in code that is compiled; None: torch's is for the compiler to fuse, or export.

    Its own gradient of pooling takes most of a millisecond of a training step, more than fusing it gains.
    """
    return max_pool(x, list(geometry))[0] if trains(x) else None


@torch.library.custom_op("vicinal::max_pool", mutates_args=())
def max_pool(x: Tensor, windows: list[int]) -> tuple[Tensor, Tensor]:
    """Return the largest value of every window and its place: a piece of work that compilers leave alone."""
    geometry, x = Geometry(*windows), x.contiguous(memory_format=torch.channels_last)
    pool = pool_for(x, geometry)
    return by_torch(x, geometry) if pool is None else pool.pooled(x)


@torch.library.custom_op("vicinal::max_pool_gradient", mutates_args=())
def max_pool_gradient(dy: Tensor, places: Tensor, shape: list[int], windows: list[int]) -> Tensor:
    """Return for every input the sum of dy over the windows that took it."""
    geometry, size = Geometry(*windows), torch.Size(shape)
    pool = pool_for(dy, geometry)
    return spread_by_torch(dy, places, size, geometry) if pool is None else pool.spread(dy, places, size)


@max_pool.register_fake
def _(x: Tensor, windows: list[int]) -> tuple[Tensor, Tensor]:
    return empty_outputs(x, Geometry(*windows))


@max_pool_gradient.register_fake
def _(dy: Tensor, places: Tensor, shape: list[int], windows: list[int]) -> Tensor:
    return torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)


def _keep(ctx: Any, inputs: tuple[Tensor, list[int]], output: tuple[Tensor, Tensor]) -> None:
    x, windows = inputs
    ctx.save_for_backward(output[1])
    ctx.shape, ctx.windows = x.shape, windows


def _backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    (places,) = ctx.saved_tensors
    return max_pool_gradient(dy, places, ctx.shape, ctx.windows), None


max_pool.register_autograd(_backward, setup_context=_keep)


def by_torch(x: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return what the kernels return, where they cannot be had."""
    tall, wide, down, across, above, before = geometry
    y, at = F.max_pool2d(x, (tall, wide), (down, across), (above, before), return_indices=True)
    top, left = corners(y, geometry)
    places = (at // x.shape[3] - top) * wide + at % x.shape[3] - left
    return y, places.to(torch.uint8).contiguous(memory_format=torch.channels_last)


def spread_by_torch(dy: Tensor, places: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """Return the gradient that the kernels return, where they cannot be had."""
    at = positions(places, shape, geometry).flatten(2)
    dx = torch.zeros(shape, dtype=dy.dtype, device=dy.device).flatten(2).scatter_add_(2, at, dy.flatten(2))
    return dx.view(shape).contiguous(memory_format=torch.channels_last)


def geometry_of(layer: nn.MaxPool2d) -> Geometry | None:
    """Return the windows of a layer; None where the kernels do not know such."""
    if layer.ceil_mode or layer.return_indices or _both(layer.dilation) != (1, 1):
        return None
    geometry = Geometry(*_both(layer.kernel_size), *_both(layer.stride), *_both(layer.padding))
    return geometry if geometry.allowed else None


def _both(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def pool_for(x: Tensor, geometry: Geometry) -> Pool | None:
    """Return the kernels for an input; None where it is no plain tensor, or they cannot be compiled."""
    others = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if others or type(x) is not Tensor:
        return None
    lanes = lanes_of(x, geometry)
    kernels = pool_kernels.kernels_of(x.device.index, geometry, x.dtype == torch.bfloat16, lanes)
    return None if kernels is None else Pool(geometry, lanes, *kernels)


def trains(x: Tensor) -> bool:
    """Say whether a gradient may be asked for."""
    return torch.is_grad_enabled() and x.requires_grad


def suited(x: Tensor, geometry: Geometry) -> bool:
    """Say whether the kernels know such an input: channels side by side, not too large."""
    if x.device.type != DEVICE or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    if x.dim() != 4 or x.numel() == 0 or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    rows, columns = geometry.patches(*x.shape[2:])  # no fewer than windows
    most = max(x.numel(), x.shape[0] * x.shape[1] * rows * columns)
    return most <= MOST_VALUES and min(geometry.outputs(*x.shape[2:])) > 0
