import math
from decimal import ROUND_HALF_EVEN, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vicinal.report.printed import MINUS, as_given, leaders, number, probability, signed, told_apart


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (93.46, 1, "93.5"),
        (-0.04, 1, "0.0"),
        (-0.06, 1, f"{MINUS}0.1"),
        (12345.678, 2, "12,345.68"),
        (math.nan, 1, "NaN"),
        (math.inf, 1, "NaN"),
        (0.5, 0, "0"),
    ],
)
def test_numbers(value: float, decimals: int, text: str) -> None:
    assert number(value, decimals) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.23, "+1.2"), (-1.23, f"{MINUS}1.2"), (0.04, "0.0"), (-0.04, "0.0"), (math.nan, "NaN")],
)
def test_differences_have_a_sign_unless_they_print_as_zero(value: float, text: str) -> None:
    assert signed(value, 1) == text


@given(st.decimals(-1000, 1000, places=4), st.integers(0, 4))
def test_numbers_are_rounded_as_decimals_are(value: Decimal, decimals: int) -> None:
    exact = Decimal(float(value)).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_EVEN)
    assert Decimal(number(float(value), decimals).replace(MINUS, "-").replace(",", "")) == exact


@pytest.mark.parametrize(
    ("value", "text"), [(95.9, "95.9"), (29.14, "29.14"), (21.6, "21.6"), (93.0, "93.0"), (11.184, "11.184")]
)
def test_the_papers_figures_keep_their_decimals(value: float, text: str) -> None:
    assert as_given(value, 1) == text


def test_p_values() -> None:
    assert [probability(p) for p in (0.0004, 0.0123, 0.0625, 0.25, 1.0, math.nan)] == [
        "< 0.001",
        "0.012",
        "0.062",
        "0.25",
        "1.00",
        "NaN",
    ]


@pytest.mark.parametrize(
    ("values", "higher", "ranks"),
    [
        ([90.0, 91.0, 92.0], True, [None, 1, 0]),
        ([90.0, 91.0, 92.0], False, [0, 1, None]),
        ([92.04, 91.96, 91.94, 91.86, 50.0], True, [0, 0, 1, 1, None]),
        ([92.0, math.nan, 91.0], True, [0, None, 1]),
        ([math.nan, 91.0], True, [None, None]),
        ([91.0, 91.0], True, [0, 0]),
        ([9.96, 10.04, 9.9], True, [0, 0, 1]),  # as texts 9.9 would come before 10.0
        ([-0.04, 0.04, 0.2], False, [0, 0, 1]),
        ([], True, []),
    ],
)
def test_leaders_share_what_prints_alike(values: list[float], higher: bool, ranks: list[int | None]) -> None:
    assert leaders(values, 1, higher) == ranks


def test_names_say_only_what_tells_them_apart() -> None:
    names = told_apart(["soft", "soft", "vnl", "soft"], [("a", "x"), ("a", "y"), ("b", "x"), ("a", "z")])
    assert names == ["soft (x)", "soft (y)", "vnl", "soft (z)"]
