"""Memory by a counter that the test moves, and on a GPU the same for the same case."""

from typing import Any

import pytest
import torch

from vicinal.benchmarks.bench import memory
from vicinal.benchmarks.bench.cases import adapter_case
from vicinal.benchmarks.bench.measure import measure
from vicinal.benchmarks.bench.memory import STEPS, Held, PeakMemory, held, idle_bytes, peak_of, settled
from vicinal.benchmarks.bench.scale import Shape

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def segment(pool: tuple[int, int], total: int, allocated: int) -> dict[str, Any]:
    return {"segment_pool_id": pool, "total_size": total, "allocated_size": allocated}


def test_what_a_recording_keeps_free_for_itself_is_idle() -> None:
    parts = [segment((0, 0), 100, 10), segment((0, 1), 50, 20), segment((3, 0), 8, 8), segment((0, 1), 7, 0)]
    assert idle_bytes(parts) == 30 + 0 + 7
    assert idle_bytes([]) == 0


def test_memory_is_not_guessed_where_it_is_not_measured() -> None:
    with PeakMemory(CPU) as found:
        torch.zeros(1000)
    assert found.bytes is None
    assert held(CPU) is None
    assert settled(CPU) is None
    assert peak_of(lambda: None, CPU, None) is None


class Meter:
    """Stands for a GPU's allocator: tensors and recordings that a test makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = self.idle = 0
        monkeypatch.setattr(memory, "settled", lambda device: held(device))
        monkeypatch.setattr(memory, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.most)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment((0, 1), self.idle, 0)])
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, device: torch.device) -> None:
        self.most = self.now

    def take(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def test_the_peak_is_of_steps_after_warm_up_with_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, steps = Meter(monkeypatch), []
    meter.take(1000)  # another case
    meter.idle = 300
    before = memory.settled(GPU)
    assert before == Held(1000, 300)
    meter.take(40)  # the net
    meter.take(500)  # warming up took more than steps do
    meter.take(-500)
    meter.idle += 70  # the recording

    def step() -> None:
        steps.append(None)
        meter.take(5)
        meter.take(-5)

    assert peak_of(step, GPU, before) == 40 + 5 + 70
    assert len(steps) == STEPS


def test_a_block_counts_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch)
    meter.take(1000)
    with PeakMemory(GPU) as found:
        meter.take(60)
        meter.take(-60)
    assert found.bytes == 60


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_case_takes_the_same_whatever_ran_before() -> None:
    shape = Shape("small", 32, 8, 8, classes=3)
    cases = [adapter_case(name, "vnl", shape, GPU, update="marginal") for name in ("a", "b", "c")]
    first, *others = [one.peak_bytes for one in measure(cases, GPU, 1, 0.0, count=False)]
    assert first is not None
    assert first > 0
    assert others == pytest.approx([first] * 2, abs=4 << 20)  # a library's scratch memory is 8 MiB or more
