"""How sure a rule may be of a domain that its model never saw, learned on left-out domains.

Two ways: a temperature that is fitted there, one for all streams; or for every stream the one by which
predictions are as unsure as the frozen source model differs from them, with nothing to fit. The second one
tells an easy target from a hard one, and follows a model that updates make surer. Which is taken is decided
on domains that the temperature was not fitted on, by the later half of their streams: a target's stream is
longer than theirs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vicinal.adapters.agreement import Agreement
from vicinal.adapters.passes import as_logits
from vicinal.adapters.vnl_settings import VnlSettings
from vicinal.functional.calibration import fitted_temperature
from vicinal.functional.losses import label_cross_entropy

KAPPA = 1.0  # as many errors as differences; fitted to the other domains it is no better on the next one


class Told(NamedTuple):
    """A left-out stream in batches: what was predicted, what the frozen model said, what is true."""

    domain: str
    p: Tensor  # (T, N, C), probabilities
    says: Tensor  # (T, N), classes
    y: Tensor  # (T, N), classes


class Sureness(NamedTuple):
    """The temperature that was fitted, and the mean NLL on domains in either way."""

    temperature: float
    nll_by_temperature: float  # of each domain by what was fitted on the others
    nll_by_agreement: float

    @property
    def options(self) -> dict[str, float]:
        """The option of the better way."""
        if self.nll_by_agreement < self.nll_by_temperature:
            return {"agreement": KAPPA}
        return tempered_by(self.temperature)


def tempered_by(temperature: float) -> dict[str, float]:
    """Return the option that a fitted temperature makes; where none was fitted, none."""
    return {} if temperature == 1 else {"output_temperature": temperature}


def fitted_sureness(told: Sequence[Told], settings: VnlSettings) -> Sureness:
    """Return how either way does on the later half of left-out streams, each counting the same."""
    tempered, agreed = [], []
    for one in told:
        others = [other for other in told if other.domain != one.domain]
        T = _temperature(others or told)
        tempered.append(_nll((as_logits(one.p) / T).softmax(-1), one.y))
        agreed.append(_nll(agreeing(one, settings), one.y))
    return Sureness(_temperature(told), sum(tempered) / len(told), sum(agreed) / len(told))


@torch.no_grad()
def agreeing(told: Told, settings: VnlSettings) -> Tensor:
    """Return the predictions along a stream, (T, N, C), as sure as they agree with the frozen model."""
    agreement = Agreement(settings.agreement_window, torch.zeros_like(told.p[0, 0]))
    made = []
    for p, says in zip(told.p, told.says, strict=True):
        logits = as_logits(p)
        made.append((logits / agreement(logits, says, KAPPA, settings.agreement_prior)).softmax(-1))
    return torch.stack(made)


def later(steps: Tensor) -> Tensor:
    """Return what came in the later half of a stream's steps (T, N, ...), sample by sample."""
    return steps[len(steps) // 2 :].flatten(0, 1)


def _temperature(told: Sequence[Told]) -> float:
    return fitted_temperature([later(one.p) for one in told], [later(one.y) for one in told])


def _nll(p: Tensor, y: Tensor) -> float:
    return float(label_cross_entropy(later(p), later(y)))
