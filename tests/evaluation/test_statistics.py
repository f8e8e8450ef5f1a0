"""Statistics over seeds, against scipy and against plain loops."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vicinal.errors import DataError
from vicinal.evaluation.statistics import EXACT_PAIRS, Paired, deviation, paired, per_seed, summary

VALUES = [0.91, 0.925, 0.89, 0.94, 0.902]


def by_seed(values: list[float]) -> dict[int, float]:
    return dict(enumerate(values))


def brute_force_p(differences: Sequence[float]) -> float:
    """Return the share of sign patterns at least as extreme, in exact arithmetic."""
    exact = [Fraction(value) for value in differences]
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, exact, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(exact))
    ]
    return sum(value >= abs(sum(exact)) for value in sums) / len(sums)


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_mean_and_std_are_numpys(count: int) -> None:
    values = list(np.random.default_rng(count).normal(0.9, 0.02, count))
    found = summary(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.std == pytest.approx(np.std(values, ddof=1))
    assert found.count == count


@pytest.mark.parametrize("count", [3, 5, 12])
def test_the_interval_is_scipys_percentile_bootstrap(count: int) -> None:
    values = np.random.default_rng(count).normal(0.9, 0.02, count)
    options = {"method": "percentile", "n_resamples": 40_000, "rng": np.random.default_rng(7)}
    interval = stats.bootstrap((values,), np.mean, **options).confidence_interval
    found = summary(list(values))
    # Other draws than ours, and of three seeds only ten different means can be drawn.
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=0.1 * values.std())


def test_the_interval_of_two_seeds_ends_at_them() -> None:
    # A quarter of all draws takes one seed twice: far more than the 2.5% of a tail.
    found = summary([0.25, 0.75])
    assert (found.low, found.high) == (0.25, 0.75)


def test_the_interval_is_the_same_every_time() -> None:
    assert summary(VALUES) == summary(VALUES)


def test_one_seed_has_a_mean_and_nothing_else() -> None:
    found = summary([0.5])
    assert (found.mean, found.std, found.low, found.high, found.count) == (0.5, None, None, None, 1)
    assert deviation([0.5]) is None


def test_no_seed_is_an_error() -> None:
    with pytest.raises(DataError, match="no values"):
        summary([])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_broken_seed_shows_in_everything(bad: float) -> None:
    found = summary([0.5, bad, 0.7])
    assert all(map(math.isnan, (found.mean, found.std, found.low, found.high)))  # type: ignore[arg-type]
    other = paired(by_seed([*VALUES, bad]), by_seed([0.5] * 6))
    assert all(map(math.isnan, (other.difference, other.low, other.high, other.p)))  # type: ignore[arg-type]


def test_a_value_per_seed_is_the_mean_over_targets_of_the_mean_over_runs() -> None:
    runs = [(0, "a", 0.1), (0, "a", 0.3), (0, "a", 0.5), (0, "b", 0.9), (4, "b", 0.25), (4, "a", 0.75)]
    assert per_seed(runs) == pytest.approx({0: (0.3 + 0.9) / 2, 4: 0.5})


@pytest.mark.parametrize("count", [5, 6, 9])
@pytest.mark.parametrize("shift", [0.0, 0.5, 5.0])
def test_p_is_the_share_of_all_sign_patterns(count: int, shift: float) -> None:
    rng = np.random.default_rng(count)
    a, b = rng.normal(shift, 1, count), rng.normal(0, 1, count)
    found = paired(by_seed(list(a)), by_seed(list(b)))
    assert found.p == pytest.approx(brute_force_p(list(a - b)), abs=1e-15)
    assert found.difference == pytest.approx((a - b).mean())
    assert found.count == count


@pytest.mark.parametrize("count", [5, 8])
def test_p_is_scipys_paired_permutation_test(count: int) -> None:
    rng = np.random.default_rng(count)
    a, b = rng.normal(0.4, 1, count), rng.normal(0, 1, count)

    def mean_difference(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
        return np.asarray((x - y).mean(axis=axis))

    reference = stats.permutation_test(
        (a, b), mean_difference, permutation_type="samples", n_resamples=np.inf, vectorized=True
    )
    assert paired(by_seed(list(a)), by_seed(list(b))).p == pytest.approx(reference.pvalue)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-1000, 1000), min_size=5, max_size=7))
def test_p_of_any_differences(thousandths: list[int]) -> None:
    # Sums of thousandths that are equal differ in floating point; of whole numbers they do not.
    differences = [value / 1000 for value in thousandths]
    zeros = dict.fromkeys(range(len(differences)), 0.0)
    found, mirrored = paired(by_seed(differences), zeros), paired(zeros, by_seed(differences))
    assert found.p == brute_force_p(thousandths)
    assert mirrored.p == found.p
    assert mirrored.difference == -found.difference


@pytest.mark.parametrize(("count", "least"), [(5, 0.0625), (6, 0.03125)])
def test_the_least_p_is_two_in_all_patterns(count: int, least: float) -> None:
    ones = dict.fromkeys(range(count), 1.0)
    assert paired(ones, dict.fromkeys(range(count), 0.0)).p == least


def test_equal_sums_count_as_equal_in_floating_point() -> None:
    tenths = [1, 2, -3, 1, 2, 3]
    found = paired(by_seed([value / 10 for value in tenths]), dict.fromkeys(range(6), 0.0))
    assert found.p == brute_force_p(tenths)


def test_no_difference_at_all_has_p_one() -> None:
    assert paired(by_seed(VALUES), by_seed(VALUES)) == Paired(0.0, 0.0, 0.0, 1.0, 5)


@pytest.mark.parametrize("count", [1, 4])
def test_fewer_than_five_pairs_have_no_p(count: int) -> None:
    found = paired(by_seed([1.0] * count), by_seed([0.0] * count))
    assert (found.difference, found.p, found.count) == (1.0, None, count)
    assert (found.low is None) == (count == 1)


def test_only_shared_seeds_are_paired() -> None:
    a = {0: 1.0, 1: 2.0, 2: 4.0, 9: 100.0}
    b = {2: 1.0, 1: 1.0, 0: 1.0, 7: -100.0}
    found = paired(a, b)
    assert (found.difference, found.count) == (pytest.approx(4 / 3), 3)
    nothing = paired({0: 1.0}, {1: 1.0})
    assert math.isnan(nothing.difference)
    assert (nothing.low, nothing.high, nothing.p, nothing.count) == (None, None, None, 0)


def test_the_interval_of_a_difference_is_that_of_the_differences() -> None:
    a, b = np.array(VALUES), np.array([0.9, 0.9, 0.85, 0.95, 0.88])
    found, alone = paired(by_seed(list(a)), by_seed(list(b))), summary(list(a - b))
    assert (found.low, found.high) == (alone.low, alone.high)


def test_many_pairs_are_drawn_and_agree_with_the_exact_test() -> None:
    rng = np.random.default_rng(3)
    differences = list(rng.normal(0.8, 1, EXACT_PAIRS + 2))
    found = paired(by_seed(differences), dict.fromkeys(range(EXACT_PAIRS + 2), 0.0))
    signs = 1 - 2 * (np.arange(2 ** len(differences))[:, None] >> np.arange(len(differences)) & 1)
    exact = np.mean(np.abs(signs @ np.array(differences)) >= abs(sum(differences)) - 1e-9)
    assert 0.01 < exact < 0.2
    assert found.p == pytest.approx(exact, rel=0.1)


def test_p_of_many_pairs_is_never_zero() -> None:
    ones = dict.fromkeys(range(60), 1.0)
    assert paired(ones, dict.fromkeys(range(60), 0.0)).p == pytest.approx(1 / (2**EXACT_PAIRS + 1))
