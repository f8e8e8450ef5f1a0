"""Time of steps: rounds in turn, so that whatever slows a machine down slows all alike."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Work = Callable[[], object]  # a call is one step
Now = Callable[[], float]
# On a GPU a step is compiled where that was asked for, runs as written, is recorded, then replayed: only what
# comes after is worth timing.
WARM_CALLS = {"cpu": 1, "cuda": 5}
MOST_REPEATS = 50


@dataclass(frozen=True)
class Timed:
    """Seconds of a step in each round, a mean over `repeats` calls; `error` says why there are none."""

    rounds: tuple[float, ...] = ()
    repeats: int = 0
    error: str = ""


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how many times as long one takes as the other: the median over rounds measured in turn."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def spread(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest of the rounds' ratios, of which `ratio` is the median."""
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    return min(ratios), max(ratios)


def reason(error: BaseException) -> str:
    """Return why something failed, in one short line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300].rstrip(": ")


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Work, device: torch.device, repeats: int, now: Now = time.perf_counter) -> float:
    """Return seconds of a call, a mean over `repeats` without a pause between them."""
    synchronize(device)
    started = now()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (now() - started) / repeats


def repeats_for(step_seconds: float, round_seconds: float) -> int:
    """Return how many steps make a round of about so many seconds: at least one."""
    return max(1, min(MOST_REPEATS, math.ceil(round_seconds / max(step_seconds, 1e-9))))


def warmed(work: Work, device: torch.device, round_seconds: float, now: Now = time.perf_counter) -> int:
    """Run a step until it is as fast as it gets; return how many make a round."""
    for _ in range(WARM_CALLS[device.type]):
        work()
    return repeats_for(seconds(work, device, 1, now), round_seconds)


def interleaved(
    works: Mapping[str, Work],
    repeats: Mapping[str, int],
    device: torch.device,
    rounds: int,
    now: Now = time.perf_counter,
) -> dict[str, Timed]:
    """Return the times of several steps, all of them in every round; one that fails is left out from then."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for name, work in works.items():
            if name in errors:
                continue
            try:
                taken[name].append(seconds(work, device, repeats[name], now))
            except Exception as error:  # whatever a step raises, the others go on
                errors[name] = reason(error)
    return {
        name: Timed(error=errors[name]) if name in errors else Timed(tuple(taken[name]), repeats[name])
        for name in works
    }


def release(device: torch.device) -> None:
    """Give back the memory of what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
