"""How sure predictions should be: by the true classes where they are known, else by a second opinion."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

COLDEST, HOTTEST = 0.1, 10.0  # where all is right, or nothing, there would be no end
HALVINGS = 30  # of what lies between them
MATCHINGS = 14  # the same along a stream: T to within 0.02%


@torch.no_grad()
def fitted_temperature(probabilities: Sequence[Tensor], labels: Sequence[Tensor]) -> float:
    """Return T by which softmax(log p / T) has the lowest NLL, a mean over streams that count the same.

    One temperature for all classes and images changes no prediction, only how sure it is (Guo et al. 2017).
    The NLL is convex in 1 / T: where its slope changes sign is found by halving. Probabilities that are not
    finite, and no probabilities at all, have none: T = 1.
    """
    logs = [p.double().clamp_min(torch.finfo(torch.float32).tiny).log() for p in probabilities]
    if not logs or not all(len(log) and bool(log.isfinite().all()) for log in logs):
        return 1.0
    pairs = [(log, y.to(log.device)[:, None]) for log, y in zip(logs, labels, strict=True)]
    low, high = 1 / HOTTEST, 1 / COLDEST
    for _ in range(HALVINGS):
        beta = (low * high) ** 0.5
        if sum(float(_slope(log, y, beta)) for log, y in pairs) > 0:
            high = beta
        else:
            low = beta
    return float((low * high) ** -0.5)


def _slope(log: Tensor, y: Tensor, beta: float) -> Tensor:
    """Return the derivative of a stream's NLL by beta = 1 / T: what l is on average, less what it is at y."""
    return ((beta * log).softmax(-1) * log).sum(-1).mean() - log.gather(1, y).mean()


@torch.no_grad()
def expected_errors(differing: Tensor, n: Tensor, unsure: Tensor, kappa: float, prior: float) -> Tensor:
    """Return e, which share of n predictions is wrong, by how many of them a second model differs on.

    e = (kappa d + n_0 u) / (n + n_0), d the number that both differ on, u how unsure the predictions are by
    themselves, which counts for n_0 images (`prior`). Of two models that err apart from each other one is
    wrong about as often as they differ (Jiang et al. 2022): kappa is near 1.
    """
    return (kappa * differing + prior * unsure) / (n + prior)


@torch.no_grad()
def matched_temperature(logs: Tensor, known: Tensor, e: Tensor) -> Tensor:
    """Return T by which the known ones of predictions softmax(logs / T), (M, C), are wrong as often as e.

    mean_i (1 - max_c p_ic) = e, by their own word. They are the surer the lower T: where both sides meet is
    found by halving, in as many steps whatever the numbers, so that the search can be recorded.
    """
    low, high = (logs.new_full((), math.log(end)) for end in (COLDEST, HOTTEST))
    for _ in range(MATCHINGS):
        middle = (low + high) / 2
        too_unsure = unsureness(logs / middle.exp(), known) > e
        low, high = torch.where(too_unsure, low, middle), torch.where(too_unsure, middle, high)
    return ((low + high) / 2).exp()


def unsureness(logits: Tensor, known: Tensor) -> Tensor:
    """Return u = 1 - mean_i max_c p_ic over the known ones of M predictions: how often they expect to err."""
    sure = logits.softmax(-1).amax(-1)
    return 1 - sure.masked_fill(~known, 0).sum(-1) / known.sum(-1)
