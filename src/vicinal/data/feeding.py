"""Batches made ahead of time by worker threads, in order, for images that do not live on the device."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from vicinal.data.pixels import Images

Plan = TypeVar("Plan")
Made = TypeVar("Made")

WORKERS = 2
AHEAD = 4
# Past this size a memory-mapped file may not stay in the page cache, and a batch may wait for the disk.
LARGE_BYTES = 4 << 30


def made_ahead(plans: Iterable[Plan], make: Callable[[Plan], Made], workers: int) -> Iterator[Made]:
    """Yield make(plan) for each plan, in order; with workers a few are made before they are asked for.

    Plans are drawn in the caller's thread, one after another, so that random numbers come in the same order
    however many workers there are.
    """
    if workers < 1:
        yield from map(make, plans)
        return
    waiting: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(workers) as executor:
        try:
            for plan in plans:
                waiting.append(executor.submit(make, plan))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            executor.shutdown(cancel_futures=True)


def workers_for(images: Iterable[Images], device: torch.device | str) -> int:
    """Return how many workers feeding a device from these images takes: none when they already live there."""
    place, every = torch.device(device), list(images)
    there = all(image.device.type == place.type for image in every)
    return 0 if there and sum(image.shape.numel() for image in every) < LARGE_BYTES else WORKERS


def fetched_by(device: torch.device | str) -> bool:
    """Return whether a device takes data out of the CPU's memory by itself, if they are pinned there."""
    return torch.device(device).type == "cuda"
