"""Where the time of a step goes: its kernels by kind, and the gaps in which the device waits."""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vicinal.benchmarks.bench.timing import WARM_CALLS, Work, synchronize

# The first that fits counts. Memory formats are in the names of all sorts of kernels: layout comes late.
KINDS = (
    ("matrix products", r"xmma|gemm|cutlass|wgrad|dgrad|fprop|nvjet|winograd|conv(?!ert)|::(add)?b?a?mm"),
    ("labels", r"^read_stream$"),
    (
        "normalization",
        r"batch_?norm|bn_(fw|bw)|layer_?norm|group_?norm|welford|^norm_|^average$|^renormalize$",
    ),
    ("optimizer", r"adam|multi_tensor|foreach|lerp"),
    ("fused by a compiler", r"^triton"),
    ("pooling", r"pool"),
    ("copies and layout", r"nchw|nhwc|memcpy|memset|copy|catarray|::cat|fill|index_select|clone"),
    ("reductions", r"reduce|softmax|nll_loss|::sum|::mean|cross_entropy|isfinite"),
    ("elementwise", r"elementwise|threshold|relu|::(add|sub|mul|div|exp|log|sqrt|where|clamp)"),
)
OTHER = "other"
WAITING = "waiting"
STEPS = 5

Span = tuple[str, float, float]  # name, start and end


@dataclass(frozen=True)
class Profile:
    """Milliseconds of a step by kind; with `WAITING`, they add up to `total`."""

    total: float
    kinds: dict[str, float]


def kind_of(name: str) -> str:
    """Return what kind of work a kernel or an operator does, by its name."""
    lowered = name.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, lowered)), OTHER)


def by_kind(spans: Iterable[Span], steps: int, scale: float = 1.0) -> Profile:
    """Return the time of each kind and of the gaps between all of them, a mean over steps.

    Where two kernels overlap, the later one counts from where the earlier ends, so that the parts add up.
    """
    kinds: dict[str, float] = {}
    begin = end = None
    for name, start, stop in sorted(spans, key=lambda span: span[1]):
        begin, end = (start, start) if begin is None or end is None else (begin, end)
        kinds[WAITING] = kinds.get(WAITING, 0.0) + max(0.0, start - end)
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + max(0.0, stop - max(start, end))
        end = max(end, stop)
    total = 0.0 if begin is None or end is None else end - begin
    return Profile(
        total * scale / steps, {kind: value * scale / steps for kind, value in kinds.items() if value > 0}
    )


def profiled(work: Work, device: torch.device, steps: int = STEPS) -> Profile:
    """Return where the time of a step goes, after it has warmed up."""
    for _ in range(WARM_CALLS[device.type]):
        work()
    synchronize(device)
    # What the CPU does meanwhile would make ten times the events; where it is too slow, the device waits.
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as watched:
        started = time.perf_counter()
        for _ in range(steps):
            work()
        synchronize(device)
        seconds = time.perf_counter() - started
    if device.type == "cuda":
        return by_kind(_kernels(watched.events()), steps, scale=1e-3)  # events count in microseconds
    return _by_operator(watched.key_averages(), steps, 1e3 * seconds)


def _kernels(events: Iterable[Any]) -> list[Span]:
    """Return what ran on the GPU; ranges that the program named span kernels and are none."""
    return [
        (event.name, float(event.time_range.start), float(event.time_range.end))
        for event in events
        if event.device_type.name == "CUDA"
        and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("Optimizer.", "ProfilerStep"))
    ]


def _by_operator(averages: Iterable[Any], steps: int, milliseconds: float) -> Profile:
    """Return the time of each kind of operator on a CPU; what is left of the clock is Python."""
    kinds: dict[str, float] = {}
    for row in averages:
        kind = kind_of(row.key)
        kinds[kind] = kinds.get(kind, 0.0) + 1e-3 * row.self_cpu_time_total / steps
    kinds[WAITING] = max(0.0, milliseconds / steps - sum(kinds.values()))
    return Profile(milliseconds / steps, kinds)
