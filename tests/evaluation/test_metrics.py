import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from sklearn.metrics import accuracy_score, log_loss
from torch import Tensor

from vicinal.errors import DataError, UnknownNameError
from vicinal.evaluation.metrics import METRICS, accuracy, brier, chance_ece, ece, nll, reliability


def predictions(
    seed: int, count: int = 200, classes: int = 7, sharpness: float = 2.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(count, classes, generator=generator)
    return logits.softmax(dim=1), torch.randint(classes, (count,), generator=generator)


def ece_reference(probs: Tensor, labels: Tensor, bins: int) -> float:
    p, y = probs.double().numpy(), labels.numpy()
    confidence, right = p.max(axis=1), p.argmax(axis=1) == y
    total = 0.0
    for k in range(bins):
        inside = (confidence >= k / bins) & ((confidence < (k + 1) / bins) | (k == bins - 1))
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return float(total)


def brier_reference(probs: Tensor, labels: Tensor) -> float:
    total = 0.0
    for row, label in zip(probs.tolist(), labels.tolist(), strict=True):
        total += sum((p - (1.0 if c == label else 0.0)) ** 2 for c, p in enumerate(row))
    return total / len(labels)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_agrees_with_a_plain_loop(seed: int, bins: int) -> None:
    probs, labels = predictions(seed)
    assert ece(probs, labels, bins=bins) == pytest.approx(ece_reference(probs, labels, bins), abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_other_metrics_agree_with_their_references(seed: int) -> None:
    probs, labels = predictions(seed)
    exact = probs.double() / probs.double().sum(dim=1, keepdim=True)
    assert accuracy(probs, labels) == pytest.approx(accuracy_score(labels, probs.argmax(dim=1)))
    assert nll(exact, labels) == pytest.approx(log_loss(labels, exact.numpy(), labels=range(7)), rel=1e-9)
    assert brier(probs, labels) == pytest.approx(brier_reference(probs, labels), rel=1e-9)


def test_a_label_that_never_occurs_changes_nothing() -> None:
    probs, labels = predictions(0)
    labels = labels.clamp(max=2)
    assert nll(probs.double(), labels) == pytest.approx(
        -np.log(probs.double().numpy()[range(200), labels]).mean()
    )
    assert accuracy(probs, labels) == pytest.approx(float((probs.argmax(dim=1) == labels).double().mean()))
    assert brier(probs, labels) == pytest.approx(brier_reference(probs, labels))


def test_certain_and_right_is_perfect_certain_and_wrong_is_worst() -> None:
    sure = torch.eye(4)
    right, wrong = torch.arange(4), torch.arange(4).roll(1)
    assert [metric(sure, right) for metric in (accuracy, nll, brier)] == [1.0, 0.0, 0.0]
    assert ece(sure, right) == pytest.approx(0.0, abs=1e-6)
    assert [accuracy(sure, wrong), brier(sure, wrong)] == [0.0, 2.0]
    assert ece(sure, wrong) == pytest.approx(1.0)
    assert nll(sure, wrong) == pytest.approx(-math.log(np.finfo(np.float32).tiny))


def test_full_confidence_shares_the_last_bin() -> None:
    # One bin: |2/3 - 2.95/3|. With 1.0 in a bin of its own: (2 * |1/2 - 1| + |1 - 0.95|) / 3, which is 0.35.
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.95, 0.05]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 0])
    assert ece(probs, labels) == pytest.approx(abs(2 / 3 - 2.95 / 3), abs=1e-6)


@pytest.mark.parametrize("row", [[1.0000001, 0.0], [1.0, -1e-9]])
def test_a_rounding_error_outside_the_unit_interval_is_not_taken_for_logits(row: list[float]) -> None:
    probs, labels = torch.tensor([row, [0.3, 0.7]]), torch.tensor([0, 1])
    assert ece(probs, labels) == pytest.approx(0.15, abs=1e-6)
    assert accuracy(probs, labels) == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_full(dtype: torch.dtype) -> None:
    probs, labels = predictions(1)
    halved = probs.to(dtype)
    for name in METRICS:
        assert METRICS[name](halved, labels) == pytest.approx(
            METRICS[name](halved.double(), labels), rel=1e-6
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", list(METRICS))
def test_probabilities_that_are_not_finite_give_nan(name: str, bad: float) -> None:
    probs, labels = predictions(0)
    probs[3, 1] = bad
    assert math.isnan(METRICS[name](probs, labels))


def test_reliability_leaves_out_what_is_not_finite() -> None:
    probs, labels = predictions(0, count=10)
    probs[3] = math.nan
    assert sum(reliability(probs, labels)["count"]) == 9
    assert reliability(torch.full((2, 3), math.nan), torch.tensor([0, 1]), bins=2) == {
        "count": [0.0, 0.0],
        "confidence": [0.0, 0.0],
        "accuracy": [0.0, 0.0],
    }


def test_reliability_of_a_case_worked_by_hand() -> None:
    probs = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.1, 0.9], [0.0, 1.0]], dtype=torch.float64)
    found = reliability(probs, torch.tensor([0, 1, 1, 1]), bins=4)
    assert found["count"] == [0, 0, 2, 2]
    assert found["confidence"] == pytest.approx([0, 0, 0.65, 0.95])
    assert found["accuracy"] == pytest.approx([0, 0, 0.5, 1])


def test_a_confidence_between_two_bins_counts_in_the_upper_one() -> None:
    probs = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    assert reliability(probs, torch.tensor([0]), bins=2)["count"] == [0, 1]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 31, 32, 33, 1000])
def test_the_confidence_next_to_one_has_a_finite_deviation(count: int) -> None:
    assert chance_ece(one_bin(count, 1 - 2**-53)) == pytest.approx(2 * 2**-53, rel=1e-6)


def one_bin(count: int, confidence: float) -> dict[str, list[float]]:
    return {"count": [float(count)], "confidence": [confidence], "accuracy": [0.0]}


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50, 400])
@pytest.mark.parametrize("confidence", [1e-9, 0.1, 1 / 3, 0.5, 0.9, 0.98, 1 - 1e-9])
def test_chance_agrees_with_a_sum_over_all_outcomes(count: int, confidence: float) -> None:
    outcomes = np.arange(count + 1)
    brute = (binom.pmf(outcomes, count, confidence) * abs(outcomes / count - confidence)).sum()
    assert chance_ece(one_bin(count, confidence)) == pytest.approx(brute, rel=1e-9, abs=1e-15)


def test_predictions_that_are_right_as_often_as_they_are_sure_have_that_ece_in_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = (3 * torch.randn(300, 5, generator=generator)).softmax(-1).double()
    drawn = torch.multinomial(probs, 200, replacement=True, generator=generator).T
    errors = [ece(probs, labels) for labels in drawn]
    # Within a bin confidences differ a little, which the bin's mean does not know.
    expected = chance_ece(reliability(probs, drawn[0]))
    assert expected == pytest.approx(np.mean(errors), rel=0.05)
    assert expected > 0.02, "300 images: no small part of an ECE"


def test_chance_counts_bins_by_their_images_and_needs_one() -> None:
    both = {"count": [30.0, 0.0, 10.0], "confidence": [0.7, 0.0, 0.9], "accuracy": [0.0, 0.0, 0.0]}
    parts = 0.75 * chance_ece(one_bin(30, 0.7)) + 0.25 * chance_ece(one_bin(10, 0.9))
    assert chance_ece(both) == pytest.approx(parts)
    assert chance_ece(one_bin(20, 1.0)) == chance_ece(one_bin(20, 0.0)) == 0.0
    assert math.isnan(chance_ece({}))
    assert math.isnan(chance_ece({"count": [0.0], "confidence": [0.0], "accuracy": [0.0]}))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 40),
    classes=st.integers(2, 6),
    sharpness=st.sampled_from([0.0, 1.0, 40.0]),
    bins=st.integers(1, 20),
)
def test_invariants(seed: int, count: int, classes: int, sharpness: float, bins: int) -> None:
    probs, labels = predictions(seed, count, classes, sharpness)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    found = reliability(probs, labels, bins)
    gaps = [
        n * abs(a - c) for n, a, c in zip(found["count"], found["accuracy"], found["confidence"], strict=True)
    ]
    assert sum(found["count"]) == count
    assert sum(gaps) / count == pytest.approx(ece(probs, labels, bins), abs=1e-6)
    assert 0 <= ece(probs, labels, bins) <= 1 + 1e-6
    assert 0 <= brier(probs, labels) <= 2 + 1e-6
    assert 0 <= nll(probs, labels) < 90
    for name in METRICS:
        assert METRICS[name](probs[order], labels[order]) == pytest.approx(
            METRICS[name](probs, labels), abs=1e-6
        )


@pytest.mark.parametrize(
    ("probs", "labels", "says"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), "at least one sample"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), r"\(N, C\)"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.long), r"\(N, C\)"),
        (torch.zeros(1, 2), torch.tensor([2]), r"0\.\.1"),
        (torch.zeros(1, 2), torch.tensor([-1]), r"0\.\.1"),
    ],
)
def test_what_cannot_be_measured_is_an_error(probs: Tensor, labels: Tensor, says: str) -> None:
    for measure in (*(METRICS[name] for name in METRICS), reliability):
        with pytest.raises(DataError, match=says):
            measure(probs, labels)


def test_the_registry_lists_the_four() -> None:
    assert list(METRICS) == ["accuracy", "ece", "nll", "brier"]
    with pytest.raises(UnknownNameError, match="accuracy, brier, ece, nll"):
        METRICS["f1"]
