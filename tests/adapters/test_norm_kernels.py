"""One BatchNorm layer in two kernels against the same layer as written.

The kernels' threads run on the CPU, and on a GPU if there is one.
"""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vicinal.adapters import fused_norm, norm_kernels
from vicinal.adapters.fused_norm import on_average, renormalizing
from vicinal.adapters.layers import running
from vicinal.adapters.norm_kernels import LANES, LEAST_ROWS, NAMES, THREADS
from vicinal.functional.normalization import Moments

# Channels not full, rows few and many, one value a channel, one place an image, one channel.
SHAPES = [
    (2, 3, 1, 1),
    (3, 5, 1, 2),
    (2, 33, 5, 7),
    (4, 64, 6, 6),
    (6, 1, 9, 9),
    (5, 37, 16, 16),
    (2, 8, 1, 1),
]
EPS = 1e-3
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
near_zero, far_off = (0.0, {"rtol": 2e-4, "atol": 2e-5}), (1000.0, {"rtol": 2e-3, "atol": 2e-3})


@pytest.fixture
def filled() -> Iterator[None]:
    """Fill new memory with NaN: what is read before it is written then shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch_norm(channels: int) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels, eps=EPS).eval()
    with torch.no_grad():
        layer.weight.copy_(drawn(channels, seed=1) + 0.5)
        layer.bias.copy_(drawn(channels, seed=2))
    return layer


def some_moments(channels: int, seed: int, around: float = 0.0) -> Moments:
    return Moments(drawn(channels, seed=seed) + around, drawn(channels, seed=seed + 1).square() + 0.1)


def to(thing: Any, where: Any) -> Any:
    return thing if thing is None else Moments(*(value.to(where) for value in thing))


class Ran:
    """One layer, one pass; gradients where it updates."""

    def __init__(
        self,
        layer: nn.BatchNorm2d,
        x: Tensor,
        average: Moments,
        before: Moments | None,
        updates: bool,
        rectify: bool = False,
    ) -> None:
        share = torch.tensor(0.3, dtype=x.dtype, device=x.device)
        self.fused = False

        def values(_: int, x: Tensor) -> Any:
            if updates:
                given, self.batch = renormalizing(layer, x, average, share, rectify=rectify)
            else:
                told = on_average(layer, x, average, share, before, rectify=rectify)
                given, self.batch, self.average = told
            self.fused = isinstance(given, Tensor)
            return given

        with torch.set_grad_enabled(updates), running([layer], values, on_batch=updates):
            self.y: Tensor = layer(x)
            if rectify and not self.fused:
                self.y = self.y.relu()

    def gradients(self, *inputs: Tensor, where: Tensor | None = None) -> tuple[Tensor, ...]:
        dy = drawn(*self.y.shape, seed=9).to(self.y)  # not channels last
        return torch.autograd.grad(self.y, inputs, dy if where is None else dy * where)


def compare(
    shape: tuple[int, ...],
    around: float,
    close: Any,
    device: str = "cpu",
    follow: bool = False,
    rectify: bool = False,
) -> None:
    """Check both passes and all gradients against the layer as written, in double precision."""
    channels = shape[1]
    layer = batch_norm(channels).to(device)
    average, before = some_moments(channels, 3, around), some_moments(channels, 5, around) if follow else None
    x = (drawn(*shape, seed=7) * 1.5 + around).to(device).contiguous(memory_format=torch.channels_last)
    exact, x_exact = copy.deepcopy(layer).double(), x.double()
    for updates in (False, True):
        inputs, inputs_exact = (x.clone(), x_exact.clone()) if updates else (x, x_exact)
        inputs.requires_grad_(updates), inputs_exact.requires_grad_(updates)
        found = Ran(layer, inputs, to(average, device), to(before, device), updates, rectify)
        told = (to(average, x_exact), to(before, x_exact))
        wanted = Ran(exact, inputs_exact, *told, updates, rectify)
        assert (found.fused, wanted.fused) == (True, False)
        check = partial(torch.testing.assert_close, check_dtype=False, **close)
        check(found.y, wanted.y)
        assert found.y.is_contiguous(memory_format=torch.channels_last)
        check(found.batch, wanted.batch)
        if not updates:
            assert not found.y.requires_grad
            check(found.average, wanted.average)
            continue
        # What is all but 0 may be cut off in one precision and not in the other: nothing hangs on that.
        sure = Ran(exact, inputs_exact, *told, updates).y.detach().abs() > 2 * close["atol"]
        slopes = found.gradients(inputs, layer.weight, layer.bias, where=sure)
        slopes_exact = wanted.gradients(inputs_exact, exact.weight, exact.bias, where=sure)
        for one, other in zip(slopes, slopes_exact, strict=True):
            # Sums over all rows: what is lost of one of them is lost of numbers as large as the largest.
            check(one, other, atol=close["atol"] * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("rectify", [True, False])
@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize(("around", "close"), [near_zero, far_off])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_compute_the_formulas(
    started: list[str],
    filled: None,
    shape: tuple[int, ...],
    around: float,
    close: Any,
    follow: bool,
    rectify: bool,
) -> None:
    for _ in range(2):  # nothing is left behind
        compare(shape, around, close, follow=follow, rectify=rectify)
    assert started == 2 * [*NAMES[:2], *NAMES]


@pytest.mark.parametrize("built", [(THREADS, LANES, LEAST_ROWS)], indirect=True, ids=str)
def test_blocks_of_the_size_that_a_gpu_runs(started: list[str], filled: None) -> None:
    compare((5, 37, 16, 16), *far_off, follow=True, rectify=True)


def test_one_value_a_channel_is_predicted(started: list[str], filled: None) -> None:
    layer, x = batch_norm(5), drawn(1, 5, 1, 1, seed=3)
    found = Ran(layer, x, some_moments(5, 3), None, updates=False)
    assert torch.equal(found.batch.mean, x.flatten())
    assert torch.equal(found.batch.variance, torch.zeros(5))
    exact = Ran(copy.deepcopy(layer).double(), x.double(), to(some_moments(5, 3), torch.double), None, False)
    torch.testing.assert_close(found.y.double(), exact.y)


def test_variances_of_outliers_and_of_constants(started: list[str]) -> None:
    """The first value is what the sums are around."""
    x = drawn(40, 4, 8, 8, seed=3)
    x[0, :, 0, 0] = 1e4
    x = x.contiguous(memory_format=torch.channels_last)
    found = Ran(batch_norm(4), x, some_moments(4, 3), None, updates=False)
    torch.testing.assert_close(
        found.batch.variance.double(), x.double().var(dim=(0, 2, 3), correction=0), rtol=1e-3, atol=0
    )
    x[1:] = x[0] = 3.7
    found = Ran(batch_norm(4), x, some_moments(4, 3), None, updates=False)
    assert torch.equal(found.batch.variance, torch.zeros(4))


@pytest.mark.parametrize("rectify", [True, False])
@pytest.mark.parametrize("place", [(0, 0), (5, 3)])
def test_a_nan_stays_one_and_in_its_channel(
    started: list[str], place: tuple[int, int], rectify: bool
) -> None:
    x = drawn(6, 4, 5, 5, seed=3).contiguous(memory_format=torch.channels_last)
    x[place[0], 1, place[1], 0] = float("nan")
    found = Ran(batch_norm(4), x, some_moments(4, 3), None, updates=False, rectify=rectify)
    spoiled = [bool(found.y[:, c].isnan().all()) for c in range(4)]
    assert spoiled == [False, True, False, False]
    assert [bool(v) for v in found.average.variance.isnan()] == spoiled
    assert found.y[:, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0)])
def test_gradients_that_nobody_wants_are_left_out(
    started: list[str], filled: None, wanted: tuple[int, int, int]
) -> None:
    shape = (3, 6, 5, 5)
    layer, exact = batch_norm(6), batch_norm(6).double()
    x, average = drawn(*shape, seed=4).contiguous(memory_format=torch.channels_last), some_moments(6, 3)
    x_exact = x.double()
    for values in ((x, layer.weight, layer.bias), (x_exact, exact.weight, exact.bias)):
        for value, wants in zip(values, wanted, strict=True):
            value.requires_grad_(bool(wants))
    found = Ran(layer, x, average, None, updates=True)
    expected = Ran(exact, x_exact, to(average, torch.double), None, updates=True)
    dy = drawn(*shape, seed=9)
    found.y.backward(dy)
    expected.y.backward(dy.double())
    for one, other in ((x, x_exact), (layer.weight, exact.weight), (layer.bias, exact.bias)):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-4)
    assert started == list(NAMES)


def test_where_no_gradient_is_taken_nothing_is_held(started: list[str]) -> None:
    layer, x = batch_norm(3), drawn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        instead, _ = renormalizing(layer, x, some_moments(3, 3), torch.tensor(0.3))
    assert isinstance(instead, Tensor)
    assert instead.grad_fn is None


class Scaled(nn.BatchNorm2d):
    """A layer whose class does more."""


def declined() -> dict[str, tuple[nn.Module, Tensor]]:
    x = drawn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    plain, no_bias = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    no_bias.bias = None
    return {
        "another class": (Scaled(3), x),
        "double precision": (plain.double(), x.double()),
        "half precision": (nn.BatchNorm2d(3), x.half()),
        "another layout": (nn.BatchNorm2d(3), drawn(4, 3, 2, 2)),
        "no scale": (nn.BatchNorm2d(3, affine=False), x),
        "no shift": (no_bias, x),
        "other channels": (nn.BatchNorm2d(4), x),
        "no places": (nn.BatchNorm1d(3), x[:, :, 0, 0]),
        "no images": (nn.BatchNorm2d(3), x[:0]),
    }


@pytest.mark.parametrize("why", declined())
def test_what_the_kernels_do_not_take_runs_as_written(started: list[str], why: str) -> None:
    layer, x = declined()[why]
    assert fused_norm._kernels_for(layer, x, x.new_zeros(3)) is None


def test_who_goes_to_the_kernels(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.BatchNorm2d(3), drawn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    average, share = some_moments(3, 3), torch.tensor(0.3)
    assert fused_norm._kernels_for(layer, x, *average, share) is not None
    assert fused_norm._kernels_for(layer, x, *average, share.double()) is None
    with monkeypatch.context() as patched:
        patched.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert fused_norm._kernels_for(layer, x) is None
    monkeypatch.undo()
    assert fused_norm._kernels_for(layer, x) is None  # not on a GPU


def test_an_average_inside_a_gradient_is_a_constant(started: list[str]) -> None:
    """One image with its gradient runs as written: the kernels have the gradient of batch statistics."""
    layer, x = batch_norm(3), drawn(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    instead, *_ = on_average(layer, x, some_moments(3, 3), torch.tensor(0.3))
    assert isinstance(instead, dict)
    assert started == []


def test_every_row_is_in_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_kernels, "_processors", lambda device: 132)
    for channels in (1, 24, 64, 300, 2048):
        for rows in (1, 2, 63, 64, 65, 980, 4097, 250_880):
            plan = norm_kernels._plan(torch.empty(rows, channels, 1, 1, device="meta"))
            assert plan.tiles * norm_kernels.LANES >= channels
            assert (plan.blocks - 1) * plan.chunk < rows <= plan.blocks * plan.chunk
            assert plan.blocks == 1 or plan.chunk >= norm_kernels.LEAST_ROWS
            assert plan.tiles * plan.blocks < 2 * 132 + plan.tiles


@gpu
@pytest.mark.parametrize("rectify", [True, False])
@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize(("around", "close"), [near_zero, far_off])
@pytest.mark.parametrize("shape", [*SHAPES, (20, 64, 56, 56), (3, 2048, 7, 7)], ids=str)
def test_on_a_gpu(shape: tuple[int, ...], around: float, close: Any, follow: bool, rectify: bool) -> None:
    assert norm_kernels.kernels_of(torch.cuda.current_device()) is not None
    for _ in range(3):
        compare(shape, around, close, "cuda", follow, rectify)


@gpu
def test_on_a_gpu_the_same_batch_gives_the_same_bits() -> None:
    x = drawn(20, 64, 28, 28).cuda().contiguous(memory_format=torch.channels_last).requires_grad_()
    layer, average = batch_norm(64).cuda(), to(some_moments(64, 3), "cuda")
    told = [Ran(layer, x, average, None, updates=True) for _ in range(3)]
    slopes = [run.gradients(x, layer.weight, layer.bias) for run in told]
    for run, found in zip(told, slopes, strict=True):
        assert torch.equal(run.y, told[0].y)
        assert all(torch.equal(one, other) for one, other in zip(found, slopes[0], strict=True))
