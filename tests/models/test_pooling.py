"""Max pooling in two kernels against torch's: their threads run on the CPU, and on a GPU if there is one."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F

from vicinal.models import pool_kernels, pooling
from vicinal.models.pool_kernels import NAMES, THREADS, Geometry, source
from vicinal.models.pooling import FusedMaxPool2d, fuse_pools

Pointers = Callable[[Sequence[Any]], Any]
# What CUDA has and a C++ compiler does not. Threads come one by one: none waits for another.
SHIM = """
#include <string.h>
#define __global__
#define __device__ static
#define __launch_bounds__(threads)
struct Number { int x; };
static Number threadIdx, blockIdx;
static float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
"""
DRIVER = """
#define V(i) *(Values**)told[i]
#define P(i) *(Places**)told[i]
#define I(i) *(int*)told[i]
#define RUN(call) for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) \\
    for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) call
extern "C" void run_pool_forward(void** told, int blocks) {
    RUN(pool_forward(V(0), I(1), I(2), I(3), I(4), I(5), I(6), I(7), V(8), P(9)));
}
extern "C" void run_pool_backward(void** told, int blocks) {
    RUN(pool_backward(V(0), P(1), I(2), I(3), I(4), I(5), I(6), I(7), V(8)));
}
extern "C" void round_all(const float* values, unsigned* bits, int count) {
    for (int i = 0; i < count; ++i) bits[i] = rounded(values[i]) >> 16;
}
"""
# Size, steps and padding: a ResNet's, whole tiles, every place, wide apart, not square, gaps between windows.
WINDOWS: dict[str, tuple[Any, Any, Any]] = {
    "3/2/1": (3, 2, 1),
    "2/2/0": (2, 2, 0),
    "3/1/1": (3, 1, 1),
    "5/3/2": (5, 3, 2),
    "2x3/1x2/0x1": ((2, 3), (1, 2), (0, 1)),
    "1/2/0": (1, 2, 0),
    "2/3/1": (2, 3, 1),
}
# Channels that a thread takes all of its bytes of, two of, or one by one.
SHAPES = [(2, 16, 13, 10), (1, 6, 8, 9), (3, 5, 7, 6)]
DTYPES = [torch.float32, torch.bfloat16]
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
windows = pytest.mark.parametrize("window", WINDOWS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_ties(*shape: int) -> Tensor:
    """Whole numbers, half of them 0 as after a ReLU, some of these -0."""
    x = drawn(*shape, seed=1).round().relu()
    return torch.where(drawn(*shape, seed=2) > 1, -x, x)


def with_extremes(*shape: int) -> Tensor:
    """Numbers of which some are NaN or infinite; one image is nothing but -inf."""
    x, kind = drawn(*shape, seed=1), torch.randint(12, shape, generator=torch.Generator().manual_seed(2))
    for number, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[kind == number] = value
    x[0] = -torch.inf
    return x


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@pytest.fixture
def filled() -> Iterator[None]:
    """Fill new memory with NaN: what is read before it is written then shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def library(build_cpp: Callable[[str], ctypes.CDLL]) -> Callable[[Geometry, bool, int], ctypes.CDLL]:
    """Return a function that compiles the kernels for the CPU, each kind of them once."""
    return cache(lambda geometry, half, lanes: build_cpp(SHIM + source(geometry, half, lanes) + DRIVER))


@pytest.fixture
def started(
    library: Callable[..., ctypes.CDLL], as_pointers: Pointers, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, int]]:
    """Let kernels compiled for the CPU stand where those of a GPU would; return what was started."""
    noted: list[tuple[str, int]] = []

    def kernels(device: int | None, geometry: Geometry, half: bool, lanes: int) -> list[Any]:
        built = library(geometry, half, lanes)

        def launch(name: str, grid: tuple[int, ...], block: tuple[int, ...], told: list[Any]) -> None:
            assert (block, grid[1:]) == ((THREADS, 1, 1), (1, 1))
            noted.append((name, lanes))
            getattr(built, f"run_{name}")(as_pointers(told), grid[0])

        return [partial(launch, name) for name in NAMES]

    monkeypatch.setattr(pool_kernels, "kernels_of", kernels)
    monkeypatch.setattr(pooling, "DEVICE", "cpu")
    return noted


def plain(window: str) -> nn.MaxPool2d:
    size, step, padding = WINDOWS[window]
    return nn.MaxPool2d(size, step, padding)


def fused(window: str) -> FusedMaxPool2d:
    layer = plain(window)
    fuse_pools(layer)
    assert isinstance(layer, FusedMaxPool2d)
    return layer


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def compare(window: str, x: Tensor, device: str = "cpu", dy: Tensor | None = None) -> None:
    """Check y and dx, to the bit: torch's, in single precision, adds gradients up in the same order."""
    inputs, exact = last(x).to(device).requires_grad_(), x.float().contiguous().requires_grad_()
    y, y_exact = fused(window)(inputs), plain(window)(exact)
    assert type(y.grad_fn).__name__ == "_PooledBackward"
    same(y.cpu(), y_exact.to(x.dtype))
    assert torch.equal(y.cpu().signbit(), y_exact.signbit())  # of 0 and -0 the first
    assert y.is_contiguous(memory_format=torch.channels_last)
    dy = drawn(*y.shape, seed=9).to(x.dtype) if dy is None else dy
    (dx,) = torch.autograd.grad(y, inputs, dy.to(device))
    (dx_exact,) = torch.autograd.grad(y_exact, exact, dy.float())
    same(dx.cpu(), dx_exact.to(x.dtype))
    assert dx.is_contiguous(memory_format=torch.channels_last)


@windows
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [drawn, with_ties, with_extremes])
def test_the_kernels_pool_as_torch_does(
    started: list[tuple[str, int]],
    filled: None,
    window: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    kind: Callable[..., Tensor],
) -> None:
    compare(window, kind(*shape).to(dtype))
    assert [name for name, _ in started] == list(NAMES)


@dtypes
@pytest.mark.parametrize("side", [1, 2, 3, 33])
def test_images_of_all_sizes(
    started: list[tuple[str, int]], filled: None, dtype: torch.dtype, side: int
) -> None:
    compare("3/2/1", drawn(2, 16, side, 4).to(dtype))
    compare("3/2/1", drawn(5, 16, 5, side).to(dtype))


def compare_sums(dtype: torch.dtype, device: str = "cpu") -> None:
    """Check one maximum of several windows: sums that need rounding, both kinds of halves, overflow, NaN."""
    x = torch.zeros(1, 8, 5, 5, dtype=dtype)
    x[..., 1::2, 1::2] = 1
    terms = [[1, 2**-8], [1, 3 * 2**-8], [1, -(2**-9)], [3e38, 3e38], [1, torch.nan], [torch.inf, -torch.inf]]
    dy = torch.zeros(1, 8, 3, 3)
    for channel, (one, other) in enumerate(terms):
        dy[:, channel, 0, 0], dy[:, channel, 1, 1] = one, other
    dy[:, -1] = drawn(3, 3)
    compare("3/2/1", x, device, dy.to(dtype))


@dtypes
def test_sums_are_rounded_at_the_end(
    started: list[tuple[str, int]], filled: None, dtype: torch.dtype
) -> None:
    compare_sums(dtype)


def test_rounding_is_that_of_torch(library: Callable[..., ctypes.CDLL]) -> None:
    """The NaN that a GPU's sums give has all bits set: to add to it would make it a number."""
    bits = torch.randint(-(2**31), 2**31, (10_000,), generator=torch.Generator().manual_seed(0))
    halves = torch.arange(-(2**31), 2**31, 2**20) + 2**15
    given = torch.cat([bits, halves, torch.tensor([2**31 - 1, -1])]).to(torch.int32).view(torch.float32)
    found = torch.empty_like(given, dtype=torch.int32)
    built = library(Geometry(3, 3, 2, 2, 1, 1), half=True, lanes=8)
    built.round_all(*(ctypes.c_void_p(value.data_ptr()) for value in (given, found)), len(given))
    same(found.to(torch.int16).view(torch.bfloat16), given.bfloat16())


def test_how_many_channels_a_thread_takes(started: list[tuple[str, int]]) -> None:
    def lanes(channels: int, dtype: torch.dtype, window: str = "3/2/1", offset: int = 0) -> int:
        memory = torch.zeros(2 * channels * 36 + offset, dtype=dtype)[offset:]
        x = memory.view(2, 6, 6, channels).permute(0, 3, 1, 2).requires_grad_()
        fused(window)(x)
        return started.pop()[1]

    half = torch.bfloat16
    assert [lanes(channels, half) for channels in (64, 24, 12, 6, 5)] == [8, 8, 4, 2, 1]
    assert [lanes(channels, torch.float32) for channels in (64, 12, 6, 5)] == [4, 4, 2, 1]
    assert [lanes(64, half, offset=offset) for offset in (1, 2, 4, 8)] == [
        1,
        2,
        4,
        8,
    ]  # not at a whole address
    assert lanes(64, half, "5/3/2") == 4  # or a thread has too much to do


@pytest.mark.parametrize("how", ["not channels last", "one number", "part of another"])
def test_gradients_come_in_any_layout(started: list[tuple[str, int]], filled: None, how: str) -> None:
    shape = (2, 16, 7, 5)
    given = {
        "not channels last": drawn(*shape),
        "one number": torch.tensor(2.0).expand(shape),
        "part of another": drawn(2 * 16 * 35 + 1)[1:].view(2, 7, 5, 16).permute(0, 3, 1, 2),
    }
    assert not given[how].is_contiguous(memory_format=torch.channels_last) or given[how].data_ptr() % 16
    compare("3/2/1", drawn(2, 16, 13, 10), dy=given[how])


def compare_second(window: str, device: str = "cpu") -> None:
    """Check the gradient of a gradient through a power, so that dy depends on x."""
    x, v = drawn(2, 8, 7, 9), drawn(2, 8, 7, 9, seed=3)
    found = []
    for layer in (fused(window), plain(window)):
        inputs = last(x).to(device).requires_grad_()
        (first,) = torch.autograd.grad(layer(inputs).pow(3).sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad((first * v.to(device)).sum(), inputs)[0])
    torch.testing.assert_close(*found)


@windows
def test_the_gradient_has_a_gradient(started: list[tuple[str, int]], window: str) -> None:
    compare_second(window)
    assert [name for name, _ in started] == [*NAMES, NAMES[1]]  # the last one for y, on which dy depends


def test_only_a_byte_for_every_output_is_kept(started: list[tuple[str, int]]) -> None:
    kept: list[Tensor] = []

    def note(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        y = fused("3/2/1")(last(drawn(2, 8, 7, 9)).requires_grad_())
    assert [(value.dtype, value.shape) for value in kept] == [(torch.uint8, y.shape)]


def test_in_a_net_under_other_weights(started: list[tuple[str, int]]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(128, 2))
    net, x = net.to(memory_format=torch.channels_last), last(drawn(4, 3, 9, 9))
    theta = {name: (2 * value).detach().requires_grad_() for name, value in net.named_parameters()}
    found = []
    for _ in range(2):
        loss = functional_call(net, theta, (x,)).square().sum()
        found.append(torch.autograd.grad(loss, list(theta.values())))
        fuse_pools(net)
    torch.testing.assert_close(*found)
    assert [name for name, _ in started] == list(NAMES)


class Scaled(nn.MaxPool2d):
    """A layer whose class does more."""


def test_plain_pools_and_no_others_are_fused() -> None:
    layers = {
        "plain": nn.MaxPool2d(3, 2, 1),
        "inside": nn.Sequential(nn.MaxPool2d((2, 3), (2, 1)), nn.BatchNorm2d(4)),
        "rounded up": nn.MaxPool2d(2, ceil_mode=True),
        "with indices": nn.MaxPool2d(2, return_indices=True),
        "with holes": nn.MaxPool2d(2, dilation=2),
        "large": nn.MaxPool2d(17),
        "far apart": nn.MaxPool2d(2, 17),
        "another class": Scaled(2),
        "average": nn.AvgPool2d(2),
    }
    model = nn.ModuleDict(layers)
    model["again"] = model["plain"]
    model["plain"].register_forward_hook(lambda layer, given, y: y + 1)
    before, x = {name: value.clone() for name, value in model.state_dict().items()}, drawn(1, 4, 6, 6)
    expected = model["plain"](x)
    for _ in range(2):
        fuse_pools(model)
    names = [name for name, layer in model.named_modules() if isinstance(layer, FusedMaxPool2d)]
    assert names == ["plain", "inside.0"]
    assert model["again"] is model["plain"]
    assert torch.equal(model["plain"](x), expected)  # the hook is there
    same_names = model.state_dict()
    assert same_names.keys() == before.keys()
    assert all(torch.equal(same_names[name], value) for name, value in before.items())


def declined() -> dict[str, tuple[nn.MaxPool2d, Tensor]]:
    layer, x = FusedMaxPool2d(3, 2, 1), last(drawn(2, 8, 7, 9)).requires_grad_()
    return {
        "another layout": (layer, drawn(2, 8, 7, 9).requires_grad_()),
        "double precision": (layer, x.detach().double().requires_grad_()),
        "half precision": (layer, x.detach().half().requires_grad_()),
        "one image": (layer, drawn(8, 7, 9).requires_grad_()),
        "no image": (layer, x[:0]),
        "a parameter": (layer, nn.Parameter(x.detach())),
        "rounded up": (FusedMaxPool2d(2, ceil_mode=True), x),
        "with holes": (FusedMaxPool2d(2, dilation=2), x),
        "large": (FusedMaxPool2d(17, 1, 8), x),
    }


@pytest.mark.parametrize("why", declined())
def test_what_the_kernels_do_not_take_is_torchs(started: list[tuple[str, int]], why: str) -> None:
    layer, x = declined()[why]
    expected = F.max_pool2d(
        x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode
    )
    assert torch.equal(layer(x), expected)
    assert started == []


def test_indices_are_torchs(started: list[tuple[str, int]]) -> None:
    y, indices = FusedMaxPool2d(2, return_indices=True)(last(drawn(2, 8, 4, 4)).requires_grad_())
    assert (y.shape, indices.dtype, started) == ((2, 8, 2, 2), torch.int64, [])


@pytest.mark.parametrize(("layer", "says"), [((3, 2, 2), "pad"), ((9, 1, 0), "small")])
def test_what_torch_refuses_is_refused(
    started: list[tuple[str, int]], layer: tuple[int, int, int], says: str
) -> None:
    with pytest.raises(RuntimeError, match=says):
        FusedMaxPool2d(*layer)(last(drawn(2, 8, 7, 9)).requires_grad_())


def test_other_kinds_of_gradients_are_torchs(started: list[tuple[str, int]]) -> None:
    layer, x = fused("3/2/1"), last(drawn(2, 8, 7, 9))
    wanted = torch.func.grad(lambda x: plain("3/2/1")(x).pow(3).sum())(x)
    assert torch.equal(torch.func.grad(lambda x: layer(x).pow(3).sum())(x), wanted)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), torch.ones_like(x))
        assert torch.equal(forward_ad.unpack_dual(layer(dual)).tangent, torch.ones(2, 8, 4, 5))
    assert started == []


@windows
@dtypes
def test_without_gradients_no_places_are_kept(
    started: list[tuple[str, int]], filled: None, window: str, dtype: torch.dtype
) -> None:
    x = last(with_ties(2, 16, 13, 10).to(dtype)).requires_grad_()
    expected = plain(window)(x.detach().float()).to(dtype)
    with torch.no_grad():
        assert torch.equal(fused(window)(x), expected)
    found = fused(window)(x.detach())
    assert torch.equal(found, expected)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert [name for name, _ in started] == [NAMES[0]] * 2


def compiled_gradients(layer: nn.MaxPool2d, x: Tensor, **how: Any) -> list[Tensor]:
    """Return y and dx of a layer that stands between others, compiled."""

    def run(x: Tensor) -> Tensor:
        y: Tensor = layer((2 * x).relu()).square()
        return y

    torch.compiler.reset()  # or it grows tired of layers of many kinds
    given = x.clone(memory_format=torch.channels_last).requires_grad_()
    y = torch.compile(run, fullgraph=True, **how)(given)
    return [y.detach(), *torch.autograd.grad(y.sum(), given)]


@windows
def test_a_compiler_leaves_the_kernels_alone(started: list[tuple[str, int]], window: str) -> None:
    x = drawn(2, 16, 13, 10)
    found, expected = (compiled_gradients(one(window), x, backend="aot_eager") for one in (fused, plain))
    torch.testing.assert_close(found, expected)
    assert [name for name, _ in started] == list(NAMES)


def test_where_there_are_no_kernels_compiled_code_pools_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "DEVICE", "cpu")
    monkeypatch.setattr(pool_kernels, "kernels_of", lambda *kind: None)
    for window in WINDOWS:
        x = with_ties(2, 3, 9, 8)
        found, expected = (compiled_gradients(one(window), x, backend="aot_eager") for one in (fused, plain))
        torch.testing.assert_close(found, expected)


def test_the_operations_are_what_torch_expects_of_some(started: list[tuple[str, int]]) -> None:
    windows, x = list(Geometry(3, 3, 2, 2, 1, 1)), last(drawn(2, 8, 7, 9)).requires_grad_()
    torch.library.opcheck(pooling.max_pool, (x, windows))
    y, places = pooling.max_pool(x.detach(), windows)
    torch.library.opcheck(pooling.max_pool_gradient, (last(y), places, list(x.shape), windows))


def test_what_is_exported_is_torchs(started: list[tuple[str, int]]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 2, 1)).to(memory_format=torch.channels_last)
    fuse_pools(net)
    program = torch.export.export(net.eval().requires_grad_(False), (last(drawn(2, 3, 9, 9)),))
    assert "vicinal" not in str(program.graph)
    assert started == []


def test_without_the_kernels_torchs_runs(
    started: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = last(drawn(2, 8, 7, 9)).requires_grad_()
    monkeypatch.setattr(pool_kernels, "kernels_of", lambda *kind: None)
    assert torch.equal(fused("3/2/1")(x), plain("3/2/1")(x))
    monkeypatch.undo()
    assert not pooling.suited(x, Geometry(3, 3, 2, 2, 1, 1))  # not on a GPU
    assert torch.equal(fused("3/2/1")(x), plain("3/2/1")(x))


def test_what_the_kernels_cannot_count_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "DEVICE", "meta")
    meta = partial(torch.empty, device="meta")
    takes = partial(pooling.suited, geometry=Geometry(3, 3, 2, 2, 1, 1))
    assert takes(last(meta(140, 64, 112, 112)))
    assert not takes(last(meta(2**12, 64, 112, 112)))
    padded = Geometry(16, 16, 1, 1, 8, 8)  # one place, in 81 patches
    assert takes(last(meta(2**20, 8, 1, 1)))
    assert not pooling.suited(last(meta(2**25, 8, 1, 1)), padded)


@gpu
@windows
@dtypes
@pytest.mark.parametrize("kind", [drawn, with_ties, with_extremes])
def test_on_a_gpu(window: str, dtype: torch.dtype, kind: Callable[..., Tensor]) -> None:
    for shape in [*SHAPES, (20, 64, 56, 56), (2, 2048, 7, 7)]:
        compare(window, kind(*shape).to(dtype), "cuda")


@gpu
@dtypes
def test_on_a_gpu_sums_are_rounded_at_the_end(dtype: torch.dtype) -> None:
    compare_sums(dtype, "cuda")


@gpu
@dtypes
def test_on_a_gpu_torchs_own_says_the_same(dtype: torch.dtype) -> None:
    for kind in (with_extremes, with_ties):
        x = last(kind(20, 64, 56, 56).to("cuda", dtype)).requires_grad_()
        y, expected = fused("3/2/1")(x), plain("3/2/1")(x)
        same(y, expected)
    dy = torch.rand_like(y)
    found, wanted = (torch.autograd.grad(value, x, dy)[0] for value in (y, expected))
    torch.testing.assert_close(found, wanted)


@gpu
@windows
def test_on_a_gpu_the_gradient_has_a_gradient(window: str) -> None:
    compare_second(window, "cuda")


@gpu
@dtypes
def test_on_a_gpu_a_recorded_step_waits_for_nothing_and_gives_the_same_bits(dtype: torch.dtype) -> None:
    layer, x = fused("3/2/1"), last(drawn(20, 64, 56, 56).to("cuda", dtype)).requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            y = layer(x)
        return y, torch.autograd.grad(y.float().square().sum(), x)[0]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
        recorded = step()
    for seed in range(3):
        x.data.copy_(drawn(20, 64, 56, 56, seed=seed))
        graph.replay()
        for one, other in zip(recorded, step(), strict=True):
            assert one.dtype == dtype
            assert torch.equal(one, other)


@gpu
@dtypes
def test_on_a_gpu_compiled_code_pools_by_the_kernels(dtype: torch.dtype) -> None:
    x = drawn(20, 64, 56, 56).to("cuda", dtype)
    found, expected = (compiled_gradients(one("3/2/1"), x) for one in (fused, plain))
    torch.testing.assert_close(found, expected)
