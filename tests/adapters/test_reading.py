"""The kernel of a reading against the formulas: its threads run on the CPU, and on a GPU if there is one."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from vicinal.adapters import reading
from vicinal.adapters.reading import MOST_CLASSES, Reading, read, source
from vicinal.functional.memory import empty_memory
from vicinal.models.inference import StreamInferenceNet
from vicinal.types import Head, StreamMemory

Pointers = Callable[[Sequence[Any]], Any]
# What CUDA has and a C++ compiler does not. The threads are threads and wait for one another where those of a
# block do: a wait that is missing shows, if not every time.
SHIM = """
#include <math.h>
#include <pthread.h>
#define __global__
#define __device__ static
#define __shared__ static
#define __launch_bounds__(threads)
#define __restrict__
struct Place { int x; };
static thread_local Place threadIdx;
static pthread_barrier_t barrier;
static void __syncthreads() { pthread_barrier_wait(&barrier); }
static void __syncwarp();
"""
DRIVER = """
static pthread_barrier_t warps[THREADS / LANES];  // as small as a row of threads: none may count on more
static void __syncwarp() { pthread_barrier_wait(&warps[threadIdx.x / LANES]); }
#define F(i) *(float**)told[i]
#define I(i) *(int*)told[i]
struct Job { void** told; int number; };
static void* work(void* given) {
    void** told = ((Job*)given)->told;
    threadIdx.x = ((Job*)given)->number;
    read_stream(F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), I(11), I(12), I(13), I(14),
                I(15), F(16), F(17), F(18), F(19), F(20), F(21), F(22), F(23), F(24), F(25), F(26), F(27),
                F(28));
    return 0;
}
extern "C" void run(void** told) {
    pthread_t threads[THREADS];
    Job jobs[THREADS];
    pthread_barrier_init(&barrier, 0, THREADS);
    for (int w = 0; w < THREADS / LANES; ++w) pthread_barrier_init(&warps[w], 0, LANES);
    for (int t = 0; t < THREADS; ++t) {
        jobs[t].told = told, jobs[t].number = t;
        pthread_create(&threads[t], 0, work, &jobs[t]);
    }
    for (int t = 0; t < THREADS; ++t) pthread_join(threads[t], 0);
    pthread_barrier_destroy(&barrier);
    for (int w = 0; w < THREADS / LANES; ++w) pthread_barrier_destroy(&warps[w]);
}
"""
CLOSE = {"rtol": 2e-4, "atol": 2e-5}
LOOSE = {"rtol": 1e-2, "atol": 2e-3}  # with many classes the formulas are this far from double precision too
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def net(rounds: int = 2, bounded: bool = True) -> StreamInferenceNet:
    """A phi all of whose numbers differ from those it starts with."""
    phi = StreamInferenceNet(hidden=7, rounds=rounds)
    with torch.no_grad():
        for position, part in enumerate(phi.parameters()):
            part.copy_(0.3 * drawn(*part.shape, seed=position))
        phi.location.copy_(drawn(16, seed=40))
        phi.scale.copy_(drawn(16, seed=41).abs() + 0.5)
        if bounded:
            phi.low.copy_(-drawn(16, seed=42).abs())
            phi.high.copy_(drawn(16, seed=43).abs())
    return phi.requires_grad_(False)


def head_of(classes: int, features: int) -> Head:
    return Head(drawn(classes, features, seed=1), drawn(classes, seed=2))


@pytest.fixture(scope="module", params=[(1, 1), (16, 4), (32, 32)], ids=str)
def compiled(request: Any, build_cpp: Callable[[str], ctypes.CDLL]) -> ctypes.CDLL:
    return build_cpp(SHIM + source(*request.param) + DRIVER)


@pytest.fixture
def on_cpu(compiled: ctypes.CDLL, as_pointers: Pointers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel compiled for the CPU stand where that of a GPU would."""

    def launch(grid: tuple[int, ...], block: tuple[int, ...], told: list[Any]) -> None:
        assert grid == (1, 1, 1)
        compiled.run(as_pointers(told))

    monkeypatch.setattr(reading, "_kernel", lambda *values: launch)


def as_written(
    phi: StreamInferenceNet, z: Tensor, logits: Tensor, head: Head, memory: StreamMemory
) -> Reading:
    w, after = phi(z, logits, head, memory)
    return Reading(w, after, phi.trust(after, head))


def check(
    phi: StreamInferenceNet,
    images: int,
    classes: int,
    features: int,
    device: str = "cpu",
    close: dict[str, float] = CLOSE,
) -> None:
    """Read a stream of three batches, the last one smaller, each time from the memory the formulas left."""
    phi, head = phi.to(device), Head(*(part.to(device) for part in head_of(classes, features)))
    memory = empty_memory(head)
    for seed, count in enumerate((images, images, max(1, images // 2))):
        z = drawn(count, features, seed=seed).relu().to(device)
        logits = z @ head.weight.T + head.bias
        found, expected = (way(phi, z, logits, head, memory) for way in (read, as_written))
        torch.testing.assert_close(found, expected, **close)
        memory = expected.memory


@pytest.mark.parametrize(("images", "classes", "features"), [(20, 10, 64), (3, 2, 5), (33, 40, 7)])
def test_the_kernel_computes_the_formulas(on_cpu: None, images: int, classes: int, features: int) -> None:
    check(net(), images, classes, features)


def test_single_images(on_cpu: None) -> None:
    """The spread of one image is rounding error, of which no more than a percent comes through."""
    check(net(), 1, 4, 9, close={"rtol": 0.02, "atol": 0.01})


def test_many_classes(on_cpu: None) -> None:
    check(net(), 20, 65, 512, close=LOOSE)


@pytest.mark.parametrize(
    ("images", "classes", "features", "fits"),
    [(20, 10, 2048, True), (0, 10, 8, False), (2, MOST_CLASSES + 1, 8, False), (64, 200, 512, False)],
)
def test_who_goes_to_the_kernel(
    monkeypatch: pytest.MonkeyPatch, images: int, classes: int, features: int, fits: bool
) -> None:
    monkeypatch.setattr(reading, "suited", lambda *values: True)
    monkeypatch.setattr(reading, "_compiled", lambda device: "kernel")
    z, logits = torch.zeros(images, features), torch.zeros(images, classes)
    assert (reading._kernel(z, logits) is not None) == fits


@pytest.mark.parametrize("rounds", [1, 3])
def test_any_number_of_rounds(on_cpu: None, rounds: int) -> None:
    check(net(rounds, bounded=False), 6, 5, 12)


def test_classes_that_nobody_has_seen(on_cpu: None) -> None:
    """One class takes all: it and the others have no direction, and are not moved."""
    phi, head = net(), head_of(5, 8)
    z, logits = drawn(6, 8).relu(), torch.tensor([200.0, 0, 0, 0, 0]).expand(6, 5).contiguous()
    found = read(phi, z, logits, head, empty_memory(head))
    expected = as_written(phi, z, logits, head, empty_memory(head))
    torch.testing.assert_close(found, expected, **CLOSE)
    assert all(bool(part.isfinite().all()) for part in (*found.w, *found.memory, found.trust))


def test_without_the_kernel_the_formulas_run_as_written() -> None:
    check(net(), 20, 10, 64)


@gpu
@pytest.mark.parametrize("classes", [2, 10, 65, MOST_CLASSES, MOST_CLASSES + 1])
def test_on_a_gpu(classes: int) -> None:
    assert reading._compiled(torch.cuda.current_device()) is not None
    check(net(), 20, classes, 512, "cuda", LOOSE)
