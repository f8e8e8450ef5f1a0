"""Memory that a case takes on a GPU, always in the same state: warmed up, recorded, the libraries settled."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from vicinal.benchmarks.bench.timing import Work, release, synchronize

STREAMS = 32  # that torch deals out in turn, again and again
STEPS = 2  # of which the peak is taken
DEFAULT_POOL = (0, 0)  # what torch calls the memory that belongs to no recording


class Held(NamedTuple):
    """Bytes on a GPU."""

    allocated: int  # by tensors that live
    idle: int  # of recordings, kept for tensors that live during a replay alone


def held(device: torch.device) -> Held | None:
    """Return what is taken on a GPU now; None elsewhere."""
    if device.type != "cuda":
        return None
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return Held(torch.cuda.memory_allocated(device), idle_bytes(segments))


def idle_bytes(segments: Sequence[dict[str, Any]]) -> int:
    """Return what the private pools of recordings keep beyond the tensors in them."""
    private = [part for part in segments if tuple(part["segment_pool_id"]) != DEFAULT_POOL]
    return sum(part["total_size"] - part["allocated_size"] for part in private)


def settled(device: torch.device) -> Held | None:
    """Return what is taken on a GPU once all that nobody holds is given back; None elsewhere.

    cuBLAS keeps scratch memory for every thread and stream that has multiplied (32 MiB each on an H200) until
    the process ends: the first case on a stream would be charged for it. Here all streams get theirs before.
    """
    if device.type == "cuda":
        _multiply_on(device, (torch.cuda.current_stream(device), *_streams(device)))
    release(device)
    return held(device)


def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def _multiply_on(device: torch.device, streams: Sequence[torch.cuda.Stream]) -> None:
    """Run a product and its gradient on each stream: gradients come from a thread of their own."""
    layer, x = nn.Linear(8, 8, device=device), torch.ones(8, 8, device=device)
    synchronize(device)
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.autograd.grad(layer(x).sum(), layer.weight)
    synchronize(device)


def peak_of(work: Work, device: torch.device, before: Held | None) -> int | None:
    """Return the most bytes that a warmed-up case takes beyond `before`, its recording's memory included."""
    if before is None:
        return None
    settled(device)  # a compiler that records graphs of its own throws the scratch memory away
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(STEPS):
        work()
    synchronize(device)
    after = held(device)
    assert after is not None
    return torch.cuda.max_memory_allocated(device) - before.allocated + after.idle - before.idle


class PeakMemory:
    """Bytes that tensors of a block took on a GPU at most, beyond what was taken before; None elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes: int | None = None

    def __enter__(self) -> "PeakMemory":
        self._before = settled(self._device)
        if self._before is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            synchronize(self._device)
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before.allocated
