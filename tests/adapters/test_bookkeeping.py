"""The kernels of the statistics against the formulas: compiled for the CPU, and on a GPU if there is one."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from vicinal.adapters import bookkeeping
from vicinal.adapters.bookkeeping import averaged, renormalization_to, source
from vicinal.functional.normalization import Moments, mix, renormalization, transport

CHANNELS = 300  # more than two blocks, the last one not full
EPS = 1e-5
Pointers = Callable[[Sequence[Any]], Any]
# What CUDA has and a C++ compiler does not; every thread of every block is run in turn.
SHIM = """
#include <math.h>
#define __global__
#define __device__ static
struct Place { int x; };
static Place blockIdx, blockDim, threadIdx;
"""
DRIVER = """
extern "C" void run(void (*body)(void**), void** told, int blocks, int threads) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) body(told);
}
#define F(i) *(float**)told[i]
#define I(i) *(int*)told[i]
extern "C" void body_average(void** told) {
    average(F(0), F(1), F(2), F(3), F(4), F(5), F(6), I(7), I(8), F(9), F(10));
}
extern "C" void body_renormalize(void** told) {
    renormalize(F(0), F(1), F(2), F(3), F(4), F(5), I(6), F(7), F(8));
}
"""
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def moments(seed: int, device: str = "cpu") -> Moments:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(CHANNELS, generator=generator)
    variance = torch.rand(CHANNELS, generator=generator) * 4
    variance[:3] = torch.tensor([0.0, 1e-9, 1e3])  # a dead channel, one nearly dead, a wild one
    return Moments(mean.to(device), variance.to(device))


@pytest.fixture(scope="module")
def compiled(build_cpp: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return build_cpp(SHIM + source() + DRIVER)


@pytest.fixture
def on_cpu(compiled: ctypes.CDLL, as_pointers: Pointers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels compiled for the CPU stand where those of a GPU would."""

    def kernel(name: str, *_: Tensor) -> Any:
        def launch(grid: tuple[int, ...], block: tuple[int, ...], told: list[Any]) -> None:
            compiled.run(getattr(compiled, f"body_{name}"), as_pointers(told), grid[0], block[0])

        return launch

    monkeypatch.setattr(bookkeeping, "_kernel", kernel)


def check(device: str, follow: bool, share: float) -> None:
    average, batch, before = (moments(seed, device) for seed in range(3))
    weight = torch.tensor(share, device=device)
    found = averaged(average, batch, weight, before if follow else None)
    expected = mix(transport(average, before, batch) if follow else average, batch, share)
    torch.testing.assert_close(found, expected, **CLOSE)
    found_r, found_d = renormalization_to(average, batch, weight, EPS)
    r, d = renormalization(batch, mix(average, batch, share), EPS)
    torch.testing.assert_close((found_r, found_d), (r, d), **CLOSE)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("follow", [True, False])
def test_the_kernels_compute_the_formulas(on_cpu: None, follow: bool, share: float) -> None:
    check("cpu", follow, share)


@pytest.mark.parametrize("follow", [True, False])
def test_without_kernels_the_formulas_run_as_written(follow: bool) -> None:
    check("cpu", follow, 0.3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("follow", [True, False])
def test_on_a_gpu(follow: bool) -> None:
    assert set(bookkeeping._kernels(torch.cuda.current_device())) == {"average", "renormalize"}
    check("cuda", follow, 0.3)
