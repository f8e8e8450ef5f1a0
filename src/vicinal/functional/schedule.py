"""Learning rates as a function of progress: nothing to save, nothing to restore."""

import math

WARM_UP = 0.3
START = 1 / 25
END = 1e-4


def one_cycle(progress: float) -> float:
    """Return the share of the peak learning rate at `progress` in [0, 1]: a cosine up, then a cosine down.

    Rises from 1/25 to 1 over the first 30% and falls to 1e-4 after; super-convergence's shape.
    """
    if progress < WARM_UP:
        return _cosine(START, 1.0, progress / WARM_UP)
    return _cosine(1.0, END, (progress - WARM_UP) / (1 - WARM_UP))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
