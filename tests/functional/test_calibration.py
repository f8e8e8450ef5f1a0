"""Temperatures against a search over a fine grid, and where none can be found."""

import math

import pytest
import torch
from torch import Tensor

from vicinal.functional.calibration import (
    COLDEST,
    HOTTEST,
    expected_errors,
    fitted_temperature,
    matched_temperature,
    unsureness,
)


def drawn(count: int, classes: int, sharpness: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits of which the labels are draws, and these: at T = 1 / sharpness nothing is surer."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=generator)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return sharpness * logits, labels


def by_grid(probabilities: list[Tensor], labels: list[Tensor]) -> float:
    def nll(t: float) -> float:
        each = []
        for p, y in zip(probabilities, labels, strict=True):
            q = p.double() ** (1 / t)
            each.append(float(-(q / q.sum(-1, keepdim=True)).gather(1, y[:, None]).log().mean()))
        return sum(each) / len(each)

    return min((0.1 * 1.005**k for k in range(925)), key=nll)


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 3.0])
def test_it_is_the_best_of_a_fine_grid(sharpness: float) -> None:
    parts = [drawn(400, 5, sharpness, seed) for seed in range(3)]
    p, y = [logits.softmax(-1) for logits, _ in parts], [labels for _, labels in parts]
    found = fitted_temperature(p, y)
    assert found == pytest.approx(by_grid(p, y), rel=0.01)
    assert found == pytest.approx(sharpness, rel=0.2)


def test_streams_count_the_same_however_long_they_are() -> None:
    long, short = drawn(4000, 4, 4.0, 1), drawn(200, 4, 0.5, 2)
    p, y = [long[0].softmax(-1), short[0].softmax(-1)], [long[1], short[1]]
    found = fitted_temperature(p, y)
    assert found == pytest.approx(by_grid(p, y), rel=0.01)
    whole = fitted_temperature([torch.cat(p)], [torch.cat(y)])
    assert whole > 1.3 * found


def test_it_stays_within_bounds() -> None:
    logits, labels = drawn(50, 3, 1.0)
    right, wrong = logits.argmax(-1), logits.argmin(-1)
    assert fitted_temperature([logits.softmax(-1)], [right]) == pytest.approx(COLDEST, rel=0.1)
    assert fitted_temperature([logits.softmax(-1)], [wrong]) == pytest.approx(HOTTEST, rel=0.1)
    certain = torch.eye(3)[labels]
    assert math.isfinite(fitted_temperature([certain], [labels]))


def test_what_has_broken_down_has_none() -> None:
    p, y = torch.full((4, 3), math.nan), torch.zeros(4, dtype=torch.long)
    assert fitted_temperature([p], [y]) == 1.0


def test_it_can_be_had_where_no_gradients_are_taken() -> None:
    logits, labels = drawn(100, 3, 2.0)
    with torch.no_grad():
        assert fitted_temperature([logits.softmax(-1)], [labels]) > 1.2


@pytest.mark.parametrize("e", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predictions_are_as_unsure_as_they_are_wrong(e: float, dtype: torch.dtype) -> None:
    logits = drawn(300, 6, 1.5)[0].to(dtype)
    known = torch.arange(300) < 200
    found = float(matched_temperature(logits, known, torch.tensor(e)))

    def off(t: float) -> float:
        sure = [float((row / t).exp().max() / (row / t).exp().sum()) for row in logits[:200].double()]
        return abs(1 - sum(sure) / 200 - e)

    assert found == pytest.approx(min((0.1 * 1.01**k for k in range(464)), key=off), rel=0.02)
    assert off(found) < 1e-3


def test_what_is_not_known_has_no_say() -> None:
    logits, known = drawn(40, 3, 1.0)[0], torch.arange(40) < 25
    other = torch.where(known[:, None], logits, torch.full_like(logits, 7.0))
    e = torch.tensor(0.2)
    assert torch.equal(matched_temperature(logits, known, e), matched_temperature(other, known, e))
    assert torch.equal(unsureness(logits, known), unsureness(other, known))


@pytest.mark.parametrize(("e", "end"), [(0.0, COLDEST), (1.0, HOTTEST)])
def test_a_match_that_cannot_be_stays_within_bounds(e: float, end: float) -> None:
    logits = 0.01 * drawn(50, 3, 1.0)[0]
    found = matched_temperature(logits, torch.ones(50, dtype=torch.bool), torch.tensor(e))
    assert float(found) == pytest.approx(end, rel=1e-3)


def test_errors_are_differences_and_a_little_of_ones_own_word() -> None:
    def found(differing: float, n: int, unsure: float, kappa: float, prior: float) -> float:
        told = (torch.tensor(value) for value in (differing, n, unsure))
        return float(expected_errors(*told, kappa, prior))

    assert found(30, 100, 0.5, 1.0, 0.0) == pytest.approx(0.3)
    assert found(30, 100, 0.5, 2.0, 0.0) == pytest.approx(0.6)
    assert found(30, 100, 0.5, 1.0, 20.0) == pytest.approx((30 + 10) / 120)
    assert found(0, 1, 0.4, 1.0, 1e9) == pytest.approx(0.4)
