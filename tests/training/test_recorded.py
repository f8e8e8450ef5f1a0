"""A recorded training step trains as the step does when it runs as written, and waits for no device."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vicinal import graphs
from vicinal.adapters.methods import adapt
from vicinal.benchmarks.bench.cases import episode_batches, learner_of, random_images, random_trained
from vicinal.benchmarks.bench.scale import Shape
from vicinal.graphs import Recorder
from vicinal.training import loop
from vicinal.training.learner import ALGORITHMS, Learner, set_rate

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE = Shape("small", 16, 20, 8, classes=3)
STEPS = 6
EAGER = 10**6  # runs before a step is recorded
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Return the recorders that training makes, as it makes them."""
    made: list[Recorder] = []

    def watched(*args: Any) -> Recorder:
        made.append(Recorder(*args))
        return made[-1]

    monkeypatch.setattr(loop, "Recorder", watched)
    return made


def trained(algorithm: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how far steps of changing length have moved the nets, and the terms of every step."""
    (stage,) = ALGORITHMS[algorithm]
    learner = learner_of(stage, SHAPE, device, precision="float32")
    before = weights(learner)
    step, batches = loop.recorded(stage, learner), episode_batches(stage, SHAPE, device)
    terms = []
    for number in range(STEPS):
        set_rate(learner, number / STEPS)  # one that is frozen into a recording would show
        shifted = tuple(
            batch._replace(x=batch.x.roll(number, 0), y=batch.y.roll(number, 0)) for batch in batches
        )
        terms.append(torch.stack([value.cpu() for value in step(learner, shifted).values()]))
    return weights(learner) - before, torch.stack(terms)


def weights(learner: Learner) -> Tensor:
    nets = [value for net in learner.parts.values() for value in net.parameters()]
    return torch.cat([value.detach().flatten().cpu() for value in nets])


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=needs_gpu)], ids=str)
@pytest.mark.parametrize("algorithm", ["erm", "meta"])
def test_it_trains_as_it_does_unrecorded(
    algorithm: str, device: torch.device, recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for warm_up in (EAGER, 1):
        monkeypatch.setattr(graphs, "WARM_UP", warm_up)
        found.append(trained(algorithm, device))
    assert [recorder.recordings for recorder in recorders] == [0, int(device == GPU)]
    assert [recorder.refused for recorder in recorders] == ["", ""]
    (moved, terms), (moved_recorded, terms_recorded) = found
    assert moved.norm() > 0
    # A GPU adds up in any order, and Adam makes much of the smallest gradients. A step more or less, or of
    # another length, would be a tenth or more.
    assert (moved - moved_recorded).norm() < 0.05 * moved.norm()
    torch.testing.assert_close(terms, terms_recorded, rtol=1e-2, atol=1e-3)


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """Return what makes torch raise wherever the program waits for the GPU, until the end of the test."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_waiting_is_noticed(no_waiting: Callable[[], None]) -> None:
    number = torch.ones((), device=GPU)
    no_waiting()
    with pytest.raises(RuntimeError, match="synchroniz"):
        float(number)


@needs_gpu
@pytest.mark.parametrize("algorithm", ["erm", "meta"])
def test_a_replayed_training_step_waits_for_nothing(
    algorithm: str, recorders: list[Recorder], no_waiting: Callable[[], None]
) -> None:
    (stage,) = ALGORITHMS[algorithm]
    learner = learner_of(stage, SHAPE, GPU)
    step, batches = loop.recorded(stage, learner), episode_batches(stage, SHAPE, GPU)
    for _ in range(graphs.WARM_UP + 1):
        step(learner, batches)
    assert recorders[0].recordings == 1
    torch.cuda.synchronize()
    no_waiting()
    for number in range(3):
        set_rate(learner, number / 3)
        terms = step(learner, batches)
    torch.cuda.set_sync_debug_mode("default")
    assert all(bool(value.isfinite()) for value in terms.values())


@needs_gpu
@pytest.mark.parametrize("update", ["entropy", "marginal"])
def test_a_replayed_adapter_step_waits_at_most_to_look_for_bad_pixels(
    update: str, no_waiting: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapt(random_trained(SHAPE, GPU), "vnl", update=update)
    x = random_images(SHAPE.stream_batch, SHAPE.size, GPU).float() / 255
    for _ in range(graphs.WARM_UP + 1):
        adapter(x)
    assert adapter.recorder.recordings == 1
    monkeypatch.setattr(adapter, "checked", lambda batch: batch)
    torch.cuda.synchronize()
    no_waiting()
    for _ in range(3):
        logits = adapter(x)
    torch.cuda.set_sync_debug_mode("default")
    assert bool(logits.isfinite().all())
