"""Sources with random weights, in double precision: references can then be compared closely."""

import copy
import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vicinal.adapters import fused_norm, norm_kernels
from vicinal.checkpoint import Trained
from vicinal.kernels import suited
from vicinal.models.backbones import Preprocessing, build_classifier
from vicinal.models.classifier import Classifier
from vicinal.models.inference import InferenceNet, StreamInferenceNet

CLASSES = 4
MakeSource = Callable[..., Trained]
MakeImages = Callable[..., Tensor]
Pair = tuple[Tensor, Tensor]


@pytest.fixture
def make_source() -> MakeSource:
    """Return a function that builds the same random model at every call."""
    return _source


@pytest.fixture
def images() -> MakeImages:
    """Return a function that makes seeded images of colored blocks in [0, 1]."""
    return _images


@pytest.fixture
def slow_stream() -> "type[SlowStream]":
    """Return stream statistics as a model with slow layers put in by hand."""
    return SlowStream


def _images(count: int, seed: int = 0, side: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(count, 3, 2, 2, generator=generator, dtype=torch.float64)
    noise = torch.rand(count, 3, side, side, generator=generator, dtype=torch.float64)
    return (blocks.repeat_interleave(side // 2, 2).repeat_interleave(side // 2, 3) + 0.3 * noise) / 1.3


def _source(algorithm: str = "erm", backbone: str = "small", side: int = 8) -> Trained:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        preprocessing = Preprocessing(side, 3, (0.5,) * 3, (0.25,) * 3)
        model = build_classifier(backbone, CLASSES, preprocessing=preprocessing).double()
        _settle(model, _images(64, seed=99, side=side))
        phi = InferenceNet(model.head.in_features, hidden=16)
        for layer in (phi.mean, phi.log_std):
            nn.init.normal_(layer.weight, std=0.05)
        nets = {"phi": phi.double(), "anchor_phi": _stream_phi(), "predict_phi": _stream_phi()}
        names = tuple(f"class {index}" for index in range(CLASSES))
        return Trained(model.eval(), backbone, names, preprocessing, algorithm, **nets)


@torch.no_grad()
def _settle(model: Classifier, x: Tensor) -> None:
    """Give BatchNorm running statistics near those of x, and a head whose predictions of x spread."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers:
        layer.momentum = 1.0
    z = model.train().embed(x)
    for layer in layers:
        layer.momentum = 0.1
        for buffer in (layer.running_mean, layer.running_var):
            buffer.mul_(1 + 0.2 * torch.rand_like(buffer))
    model.head.weight.mul_(1.5 / (z @ model.head.weight.T).std(0).mean())
    model.head.bias.copy_(-(z @ model.head.weight.T).mean(0))


@torch.no_grad()
def _stream_phi() -> StreamInferenceNet:
    phi = StreamInferenceNet(hidden=8).double()
    for value in phi.parameters():
        value.add_(0.1 * torch.randn_like(value))
    phi.location.add_(0.2 * torch.randn_like(phi.location))
    phi.scale.add_(0.5)
    phi.low.fill_(-0.3)
    phi.high.fill_(0.9)
    return phi


def pooled(parts: list[tuple[float, Pair]]) -> Pair:
    """Return mean and variance of weighted groups, through their second moments."""
    mean = sum(weight * m for weight, (m, _) in parts)
    second = sum(weight * (v + m**2) for weight, (m, v) in parts)
    return mean, second - mean**2


def carried(pair: Pair, before: Pair, after: Pair) -> Pair:
    """Return the statistics under x' = a x + b, the map that takes the batch from before to after."""
    a = (after[1] / before[1]).sqrt().clamp(0.5, 2)
    return a * pair[0] + (after[0] - a * before[0]), a**2 * pair[1]


class SlowLayer(nn.Module):
    """A BatchNorm layer on an average over the stream."""

    def __init__(self, layer: nn.BatchNorm2d) -> None:
        super().__init__()
        self.layer, self.act = layer, getattr(layer, "act", nn.Identity())
        self.source: Pair = (layer.running_mean.clone(), layer.running_var.clone())
        self.average, self.seen, self.before = self.source, self.source, None
        self.share, self.takes = 0.0, False
        self.constant = False  # whether the average is one even to the gradient of several images
        # Where classes are balanced: what every image counts, the source's part, and how large that is.
        self.each: list[float] | None = None
        self.home, self.missing = self.source, 0.0

    def forward(self, x: Tensor) -> Tensor:
        channels = [x[:, c].flatten() for c in range(x.shape[1])]
        mean = torch.stack([values.sum() / len(values) for values in channels])
        spread = torch.stack([((v - v.mean()) ** 2).sum() / len(v) for v in channels])
        plain = mean.detach(), spread.detach()
        self.seen = own = plain if self.each is None else self.weighted(x.detach())
        average, home = self.average, self.home
        if self.takes and self.before:
            average, home = (carried(pair, self.before, own) for pair in (average, home))
        average = pooled([(1 - self.share, average), (self.share, own)])
        if self.takes:
            self.average, self.home = average, home
        average = pooled([(1 - self.missing, average), (self.missing, home)])
        out = []
        for c in range(x.shape[1]):
            m, s = average[0][c], (average[1][c] + self.layer.eps).sqrt()
            if self.takes or self.constant or len(x) == 1:
                normal = (x[:, c] - m) / s
            else:  # values of the average, gradient of the batch
                s_b = (spread[c] + self.layer.eps).sqrt()
                normal = (x[:, c] - mean[c]) / s_b * (s_b / s).detach() + ((mean[c] - m) / s).detach()
            out.append(normal * self.layer.weight[c] + self.layer.bias[c])
        return self.act(torch.stack(out, 1))

    def weighted(self, x: Tensor) -> Pair:
        """Return mean and variance of images that count differently."""
        each = self.each or []
        alone = [(image.mean((1, 2)), image.var((1, 2), correction=0)) for image in x]
        return pooled([(w / sum(each), pair) for w, pair in zip(each, alone, strict=True)])


class SlowStream:
    """A model on an average that starts from the source's statistics as `count` images."""

    def __init__(self, source: Any, count: int = 20, floor: float = 0.05, forgets: bool = False) -> None:
        self.model: Classifier = copy.deepcopy(source.model).eval()
        self.count, self.floor, self.forgets = count, floor, forgets
        self.images, self.settled = 0, False
        self.layers: list[SlowLayer] = []
        for name, layer in list(self.model.named_modules()):
            if isinstance(layer, nn.BatchNorm2d):
                self.layers.append(SlowLayer(layer))
                parent, _, last = name.rpartition(".")
                setattr(self.model.get_submodule(parent), last, self.layers[-1])

    @property
    def average(self) -> list[Pair]:
        """Mean and variance that every layer runs on."""
        return [layer.average for layer in self.layers]

    def begin(self) -> None:
        """Expect the next batch."""
        self.settled = False
        for layer in self.layers:
            layer.before = None

    def run(self, x: Tensor, takes: bool) -> tuple[Tensor, Tensor]:
        if self.forgets:  # every pass starts from the source
            self.images, self.settled = 0, False
            for layer in self.layers:
                layer.average = layer.source
        counts = self.counts(x)
        share = counts / (self.count + self.images + counts)
        share = 0.0 if self.settled else max(share, 1 - (1 - self.floor) ** (counts / self.count))
        for layer in self.layers:
            layer.takes, layer.share = takes, share
        return self.model.features_and_logits(x)

    def look(self, x: Tensor, remember: bool = True) -> Tensor:
        """Return logits on the values of the average, with the gradient of the batch."""
        logits = self.run(x, takes=False)[1]
        for layer in self.layers:
            layer.before = (layer.before or layer.seen) if remember else None
        return logits

    @torch.no_grad()
    def take(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits on the average with the batch in it."""
        told = self.run(x, takes=True)
        self.images, self.settled = self.images + self.counts(x), True
        return told

    @torch.no_grad()
    def carry(self, x: Tensor, joined: list[Pair]) -> None:
        """Carry the average along with an update; `joined`: what every layer saw as the batch joined it."""
        for layer, pair in zip(self.layers, joined, strict=True):
            layer.before = pair
        self.run(x, takes=True)

    def counts(self, x: Tensor) -> float:
        """Return what the images of a batch count together."""
        return sum(self.layers[0].each or [1.0] * len(x))

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits of the next batch, which is not learned from."""
        self.begin()
        return self.take(x)[1]


Pointers = Callable[[Sequence[Any]], Any]
# For the kernels of normalization: what CUDA has and a C++ compiler does not. The threads of a block are
# threads; blocks come one by one, the last one first, since none may count on another.
NORM_SHIM = """
#include <math.h>
#include <pthread.h>
#define __global__
#define __device__ static
#define __shared__ static
#define __launch_bounds__(threads)
struct Place { int x, y; };
static thread_local Place threadIdx, blockIdx;
static pthread_barrier_t barrier;
static void __syncthreads() { pthread_barrier_wait(&barrier); }
"""
NORM_DRIVER = """
#define F(i) *(float**)told[i]
#define I(i) *(int*)told[i]
extern "C" void body_norm_parts(void** told) { norm_parts(F(0), I(1), I(2), I(3), I(4), F(5)); }
extern "C" void body_norm_forward(void** told) {
    norm_forward(F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), I(10), I(11), I(12), I(13),
                 I(14), I(15), F(16), F(17), F(18), F(19), F(20));
}
extern "C" void body_norm_sums(void** told) {
    norm_sums(F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), I(8), I(9), I(10), I(11), I(12), F(13));
}
extern "C" void body_norm_backward(void** told) {
    norm_backward(F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), I(10), I(11), I(12), I(13),
                  I(14), I(15), F(16), F(17), F(18));
}
struct Job { void (*body)(void**); void** told; int number, tiles, blocks; };
static void* work(void* given) {
    const Job job = *(Job*)given;
    threadIdx.x = job.number;
    for (blockIdx.y = job.blocks - 1; blockIdx.y >= 0; --blockIdx.y)
        for (blockIdx.x = job.tiles - 1; blockIdx.x >= 0; --blockIdx.x) {
            job.body(job.told);
            __syncthreads();  // before the next block takes the memory that this one's threads share
        }
    return 0;
}
extern "C" void run(void (*body)(void**), void** told, int tiles, int blocks) {
    pthread_t threads[THREADS];
    Job jobs[THREADS];
    pthread_barrier_init(&barrier, 0, THREADS);
    for (int t = 0; t < THREADS; ++t) {
        jobs[t] = Job{body, told, t, tiles, blocks};
        pthread_create(&threads[t], 0, work, &jobs[t]);
    }
    for (int t = 0; t < THREADS; ++t) pthread_join(threads[t], 0);
    pthread_barrier_destroy(&barrier);
}
"""
# Threads and channels of a block, rows that are worth one.
NORM_SIZES = [(4, 4, 1), (8, 4, 5), (16, 2, 3), (64, 32, 64)]


@pytest.fixture(scope="module", params=NORM_SIZES, ids=str)
def built(request: Any, build_cpp: Callable[[str], ctypes.CDLL]) -> tuple[ctypes.CDLL, tuple[int, int, int]]:
    return build_cpp(NORM_SHIM + norm_kernels.source(*request.param[:2]) + NORM_DRIVER), request.param


@pytest.fixture
def started(
    built: tuple[ctypes.CDLL, tuple[int, int, int]], as_pointers: Pointers, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Let the kernels compiled for the CPU stand where those of a GPU would; return what was started."""
    library, (threads, lanes, least) = built
    names: list[str] = []

    def kernel(name: str) -> Callable[..., None]:
        def launch(grid: tuple[int, ...], block: tuple[int, ...], told: list[Any]) -> None:
            assert (block, grid[2]) == ((threads, 1, 1), 1)
            names.append(name)
            library.run(getattr(library, f"body_{name}"), as_pointers(told), *grid[:2])

        return launch

    kernels = {name: kernel(name) for name in norm_kernels.NAMES}
    monkeypatch.setattr(norm_kernels, "THREADS", threads)
    monkeypatch.setattr(norm_kernels, "LANES", lanes)
    monkeypatch.setattr(norm_kernels, "LEAST_ROWS", least)
    monkeypatch.setattr(norm_kernels, "_processors", lambda device: 9)
    monkeypatch.setattr(norm_kernels, "kernels_of", lambda device: kernels)
    monkeypatch.setattr(fused_norm, "suited", partial(suited, device="cpu"))
    return names
