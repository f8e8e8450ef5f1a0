"""The plain loop in its variants: one step, run, compiled and captured in different ways."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.benchmarks.bench import plain_erm as module
from vicinal.benchmarks.bench.cases import episode_batches, model_spec, train_config, training_step
from vicinal.benchmarks.bench.floor import counting
from vicinal.benchmarks.bench.plain_erm import WARM_UP, Loop, Plain, captured, plain_case, plain_erm
from vicinal.benchmarks.bench.scale import Shape
from vicinal.benchmarks.bench.timing import Work
from vicinal.data.episodes import Batch
from vicinal.training.learner import ALGORITHMS
from vicinal.training.train import untrained

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE = Shape("small", 8, 6, 6, classes=3)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def net_behind(work: Work) -> Plain:
    """Return the net that a plain loop as written trains."""
    step = work.func  # type: ignore[attr-defined]
    net = step.args[0] if isinstance(step, partial) else work.args[0]  # type: ignore[attr-defined]
    assert isinstance(net, Plain)
    return net


def after_steps(work: Work, net: nn.Module, steps: int = 3) -> list[Tensor]:
    for _ in range(steps):
        work()
    return [value.detach().clone() for value in net.parameters()]


def by_hand(steps: int) -> list[Tensor]:
    """Return the parameters after steps of cross-entropy by torch's own textbook loop."""
    config = train_config(SHAPE)
    model = Plain(untrained(model_spec(SHAPE), config, CPU)[0]).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.backbone_lr)
    ((x, y),) = episode_batches(ALGORITHMS["erm"][0], SHAPE, CPU)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=config.label_smoothing).backward()
        optimizer.step()
    return [value.detach() for value in model.parameters()]


def test_it_is_the_textbook_loop() -> None:
    work = plain_erm(SHAPE, CPU, Loop())
    for ours, theirs in zip(after_steps(work, net_behind(work)), by_hand(3), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_it_does_as_much_arithmetic_as_vicinals_step() -> None:
    with counting() as plain:
        plain_erm(SHAPE, CPU, Loop())()
    with counting() as own:
        training_step("erm", SHAPE, CPU)()
    assert plain.flops == own.flops > 0


@pytest.mark.parametrize(("half", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_half_precision_is_really_used(half: bool, dtype: str) -> None:
    work = plain_erm(SHAPE, CPU, Loop(half=half))
    with counting() as count:
        work()
    assert count.dtype == dtype


def test_what_is_captured_is_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Callable[[Batch], None]] = []

    def as_written(step: Any, optimizer: object, batch: Batch) -> Any:
        bodies.append(step)
        return step

    monkeypatch.setattr(module, "captured", as_written)
    work = plain_erm(SHAPE, CPU, Loop(captured=True))
    (body,) = bodies
    assert body.func is module.erm_step  # type: ignore[attr-defined]
    for ours, theirs in zip(after_steps(work, net_behind(work)), by_hand(3), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_compiler_is_told_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, steps = [], []

    def compiled(model: nn.Module, **options: object) -> nn.Module:
        asked.append(options)
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(None))
    plain_erm(SHAPE, CPU, Loop())()
    assert asked == []
    plain_erm(SHAPE, CPU, Loop(compiled="default"))()
    assert steps == []  # there are no graphs of the compiler's whose step could begin
    work = plain_erm(SHAPE, CPU, Loop(compiled="reduce-overhead"))
    work(), work()
    assert [options["mode"] for options in asked] == ["default", "reduce-overhead"]
    assert len(steps) == 2


def test_a_loop_that_frees_what_recordings_read_is_built_first() -> None:
    assert plain_case("a", SHAPE, CPU, Loop(compiled="reduce-overhead")).early
    assert not plain_case("a", SHAPE, CPU, Loop(compiled="default", captured=True)).early
    assert not plain_case("a", SHAPE, CPU, Loop()).early


class FakeCuda:
    """Stands for torch.cuda's streams and graphs and notes what happens in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        for name in ("Stream", "CUDAGraph", "stream", "graph", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name.lower()))

    def stream(self, *_: object) -> Any:
        return _FakeStream() if not _ else self._block("aside")

    def current_stream(self) -> Any:
        return _FakeStream()

    def cudagraph(self) -> Any:
        events = self.events

        class Graph:
            def replay(self) -> None:
                events.append("replay")

        return Graph()

    def graph(self, graph: object, stream: object) -> Any:
        return self._block("capture")

    @contextmanager
    def _block(self, name: str) -> Iterator[None]:
        self.events.append(f"{name}:")
        yield
        self.events.append(f":{name}")


class _FakeStream:
    def wait_stream(self, other: object) -> None:
        assert isinstance(other, _FakeStream)


def test_a_capture_warms_up_aside_and_starts_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, seen = FakeCuda(monkeypatch), []
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(batch: Batch) -> None:
        cuda.events.append("step" if weight.grad is None else "step with gradients")
        seen.append(batch)
        weight.grad = torch.ones(1)

    first = Batch(torch.ones(2), torch.zeros(2))
    replay = captured(step, optimizer, first)
    warm = ["step", *["step with gradients"] * (WARM_UP - 1)]
    assert cuda.events == ["aside:", *warm, ":aside", "capture:", "step", ":capture"]

    later = Batch(torch.full((2,), 5.0), torch.full((2,), 7.0))
    replay(later)
    assert cuda.events[-1] == "replay"
    assert all(batch is seen[0] for batch in seen)  # the graph reads one memory
    assert seen[0].x.tolist() == [5.0, 5.0]
    assert seen[0].y.tolist() == [7.0, 7.0]
    assert first.x.tolist() == [1.0, 1.0]  # the caller's batch is nobody's memory


def test_a_capture_keeps_alive_what_its_graph_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    work = plain_erm(SHAPE, CPU, Loop(captured=True))
    gc.collect()
    net, optimizer, *_ = work.func.step.args  # type: ignore[attr-defined]
    assert isinstance(net, Plain)
    assert {id(value) for value in net.parameters()} == {id(v) for v in optimizer.param_groups[0]["params"]}


@gpu
@pytest.mark.parametrize("compiled", ["", pytest.param("default", marks=pytest.mark.slow)])
def test_a_captured_step_trains_as_the_step_does(compiled: Any) -> None:
    """By as far as the nets have moved: half precision and sums in any order let single weights differ."""
    moved, nets = [], []
    real = Plain.__init__

    def watched(self: Plain, *args: Any) -> None:
        real(self, *args)
        nets.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plain, "__init__", watched)
        works = [plain_erm(SHAPE, GPU, Loop(half=True, compiled=compiled, captured=c)) for c in (False, True)]
    start = [
        value.detach().cpu()
        for value in Plain(untrained(model_spec(SHAPE), train_config(SHAPE), CPU)[0]).parameters()
    ]
    for work, net, steps in zip(
        works, nets, (WARM_UP + 4, 4), strict=True
    ):  # the capture itself runs nothing
        found = after_steps(work, net, steps)
        moved.append(torch.cat([(a.cpu() - b).flatten() for a, b in zip(found, start, strict=True)]))
    assert moved[0].norm() > 0
    assert (moved[0] - moved[1]).norm() < 0.2 * moved[0].norm()
