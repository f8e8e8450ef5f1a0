"""How sure predictions should be: one number, fitted where the true classes are known."""

from collections.abc import Sequence

import torch
from torch import Tensor

COLDEST, HOTTEST = 0.1, 10.0  # where all is right, or nothing, there would be no end
HALVINGS = 30  # of what lies between them


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
