"""Accuracy and calibration of predicted probabilities.

Every metric takes probabilities (N, C) and labels (N,) and returns one number. Probabilities that are not
finite give NaN, never an exception: a method that has broken down must show up in the table as broken, not
end the run.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from vicinal.errors import DataError
from vicinal.registry import Registry

Metric = Callable[[Tensor, Tensor], float]
METRICS: Registry[Metric] = Registry("metric")


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Return the fraction of samples whose most probable class is the label."""
    probs, labels = _checked(probs, labels)
    if not bool(probs.isfinite().all()):
        return math.nan
    # Here and below, since it takes longer to import than torch and most commands measure nothing.
    from torchmetrics.functional.classification import multiclass_accuracy

    return float(multiclass_accuracy(probs, labels, num_classes=probs.shape[1], average="micro"))


def ece(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error: sum over bins of |accuracy - confidence| * share of the samples.

    The bins [k / bins, (k + 1) / bins) cut the confidence of the predicted class; the last one includes 1.
    """
    probs, labels = _checked(probs, labels)
    if not bool(probs.isfinite().all()):
        return math.nan
    from torchmetrics.functional.classification import multiclass_calibration_error

    # torchmetrics files a confidence of exactly 1 in a bin of its own; just below 1 it shares the last one.
    # It rounds to float32, so "just below" is float32's.
    below_one = probs.clamp(max=1 - torch.finfo(torch.float32).eps)
    error = multiclass_calibration_error(below_one, labels, probs.shape[1], n_bins=bins, norm="l1")
    return float(error)


def nll(probs: Tensor, labels: Tensor) -> float:
    """Return the mean of -log p(label).

    A label of probability zero counts as the smallest positive float32, so the result is finite.
    """
    probs, labels = _checked(probs, labels)
    if not bool(probs.isfinite().all()):
        return math.nan
    likelihood = probs.gather(1, labels[:, None]).clamp(min=torch.finfo(torch.float32).tiny)
    # Negating before the mean would turn a perfect score into -0.0.
    return abs(float(likelihood.log().mean()))


def brier(probs: Tensor, labels: Tensor) -> float:
    """Return the mean over samples of sum_c (p_c - [c is the label])^2, between 0 and 2."""
    probs, labels = _checked(probs, labels)
    if not bool(probs.isfinite().all()):
        return math.nan
    one_hot = torch.nn.functional.one_hot(labels, probs.shape[1])
    return float((probs - one_hot).square().sum(dim=1).mean())


def reliability(probs: Tensor, labels: Tensor, bins: int = 15) -> dict[str, list[float]]:
    """Return `count`, mean `confidence` and `accuracy` of each confidence bin, in the bins of `ece`.

    An empty bin has count, confidence and accuracy 0. Samples whose probabilities are not finite fall in no
    bin.
    """
    probs, labels = _checked(probs, labels)
    finite = probs.isfinite().all(dim=1)
    confidence, predicted = probs[finite].max(dim=1)
    right = (predicted == labels[finite]).to(probs.dtype)
    # float32 as in torchmetrics: a confidence on an edge must fall in the same bin for both.
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float32)
    which = (torch.bucketize(confidence.float(), edges, right=True) - 1).clamp(0, bins - 1)
    empty = torch.zeros(bins, dtype=probs.dtype)
    count = empty.index_add(0, which, torch.ones_like(confidence))
    filled = count.clamp(min=1)
    return {
        "count": count.tolist(),
        "confidence": (empty.index_add(0, which, confidence) / filled).tolist(),
        "accuracy": (empty.index_add(0, which, right) / filled).tolist(),
    }


def chance_ece(bins: Mapping[str, Sequence[float]]) -> float:
    """Return the `ece` to expect of predictions that are right exactly as often as they are sure.

    (1 / N) sum_b E|k_b - n_b c_b|, k_b ~ Binomial(n_b, c_b): of the n_b images of a bin as many are right by
    chance, c_b its mean confidence. Each mean is 2 v (1 - c) P(k = v) with v = floor(n c) + 1 (De Moivre).
    It takes the bins of `reliability`. NaN without an image in them.

    On few images much of an ECE is this: it says how low one can be there, not how good a method is.
    """
    count, confidence = ([float(value) for value in bins.get(name, ())] for name in ("count", "confidence"))
    if not sum(count):
        return math.nan
    return sum(_mean_deviation(round(n), c) for n, c in zip(count, confidence, strict=True)) / sum(count)


def _mean_deviation(n: int, p: float) -> float:
    """Return E|k - n p|, k ~ Binomial(n, p)."""
    if not n or not 0 < p < 1:
        return 0.0
    v = math.floor(n * p) + 1  # at most n: with p below 1, n p is never rounded to n
    ways = math.lgamma(n + 1) - math.lgamma(v + 1) - math.lgamma(n - v + 1)
    return 2 * v * math.exp(ways + v * math.log(p) + (n - v + 1) * math.log1p(-p))


def _checked(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities as float64 in [0, 1] and labels as int64, both on the CPU."""
    if probs.ndim != 2 or labels.shape != probs.shape[:1]:
        raise DataError(
            "metrics need probabilities (N, C) and labels (N,), "
            f"got {tuple(probs.shape)} and {tuple(labels.shape)}"
        )
    if not len(labels):
        raise DataError("metrics need at least one sample, got none: check that the stream has images")
    labels = labels.detach().cpu().long()
    if int(labels.min()) < 0 or int(labels.max()) >= probs.shape[1]:
        raise DataError(
            f"labels must be in 0..{probs.shape[1] - 1}, got {int(labels.min())}..{int(labels.max())}"
        )
    probs = probs.detach().cpu().double()
    # torchmetrics takes anything outside [0, 1], a rounding error included, for logits and applies a softmax.
    return torch.where(probs.isfinite(), probs.clamp(0, 1), math.nan), labels


METRICS.register("accuracy")(accuracy)
METRICS.register("ece")(ece)
METRICS.register("nll")(nll)
METRICS.register("brier")(brier)
