"""What a few seeds can say: mean, spread, interval and a paired test, all over values per seed.

A value per seed is the mean over targets first; statistics are over seeds, never over targets: these are
chosen, not drawn, and four of them are not four repetitions.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from vicinal.errors import DataError

LEVEL = 0.95
RESAMPLES = 10_000
# The least pairs for which a p value is given: see `paired`.
MIN_PAIRS = 5
# Up to here every pattern of signs is counted, 2^16 of them; beyond, that many are drawn.
EXACT_PAIRS = 16
# Two patterns of signs with equal sums differ in floating point; relative to the sum of magnitudes.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Summary:
    """Mean over seeds, their std (ddof 1) and a 95% interval of the mean; of one seed only the mean."""

    mean: float
    std: float | None
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Paired:
    """Mean difference over the seeds two sides share, its 95% interval, a two-sided p and the pairs."""

    difference: float
    low: float | None
    high: float | None
    p: float | None
    count: int


def per_seed(runs: Iterable[tuple[int, str, float]]) -> dict[int, float]:
    """Return a value per seed from runs (seed, target, value): runs of a target averaged, then targets."""
    found: dict[int, dict[str, list[float]]] = {}
    for seed, target, value in runs:
        found.setdefault(seed, {}).setdefault(target, []).append(value)
    return {seed: fmean(fmean(values) for values in targets.values()) for seed, targets in found.items()}


def deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation with ddof 1; None for fewer than two values, NaN if one is not finite."""
    if len(values) < 2:
        return None
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def summary(values: Sequence[float]) -> Summary:
    """Return the statistics of one value per seed.

    The interval is the percentile bootstrap over seeds: of `RESAMPLES` means of seeds drawn with replacement
    (always the same draws) the middle 95%. With few seeds it is too narrow: for normal values it covers the
    true mean in 75% of cases with 3 seeds, 83% with 5, 90% with 10. A value that is not finite makes
    everything NaN: a method that broke down on one seed must show as broken.
    """
    if not len(values):
        raise DataError("no values to summarise: run an evaluation first")
    return Summary(_mean(values), deviation(values), *_interval(values), len(values))


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired:
    """Return how far a lies above b over the seeds that both have, with a sign-flip permutation test.

    If a and b were equally good, each difference could as well have had the other sign:

        p = share of the 2^n patterns of signs s with |sum_i s_i d_i| >= |sum_i d_i|.

    The least p that n pairs can give is 2 / 2^n: 0.5 for two, 0.25 for three, 0.125 for four. Below five
    pairs no difference whatever could look unlikely, so p is None rather than a number that reads like
    "nothing found". Five still end at 0.0625; a p below 0.05 takes six pairs. Above `EXACT_PAIRS` pairs the
    patterns are drawn, always the same ones, and the observed one counts among them.
    """
    differences = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    if not differences:
        return Paired(math.nan, None, None, None, 0)
    p = _sign_flip_p(np.array(differences)) if len(differences) >= MIN_PAIRS else None
    return Paired(_mean(differences), *_interval(differences), p, len(differences))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if all(map(math.isfinite, values)) else math.nan


def _interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    if len(values) < 2:
        return None, None
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    drawn = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(np.asarray(values)[drawn].mean(axis=1), [tail, 100 - tail])
    return float(low), float(high)


def _sign_flip_p(differences: NDArray[np.float64]) -> float:
    """Return the share of sign patterns whose sum is at least as far from 0; NaN if one is not finite."""
    if not np.isfinite(differences).all():
        return math.nan
    exact = len(differences) <= EXACT_PAIRS
    signs = _all_signs(len(differences)) if exact else _drawn_signs(len(differences))
    sums = np.abs(signs @ differences)
    extreme = sums >= abs(differences.sum()) - _ROUNDING * np.abs(differences).sum()
    return float(extreme.mean()) if exact else float((extreme.sum() + 1) / (len(sums) + 1))


def _all_signs(count: int) -> NDArray[np.float64]:
    """Return every pattern of signs (2^count, count)."""
    bits = np.arange(2**count)[:, None] >> np.arange(count) & 1
    return np.where(bits, -1.0, 1.0)


def _drawn_signs(count: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).choice(np.array([-1.0, 1.0]), (2**EXACT_PAIRS, count))
