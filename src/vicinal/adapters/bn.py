"""Adapted statistics alone: much of what test-time methods claim is only this."""

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import predict
from vicinal.adapters.settings import Settings
from vicinal.adapters.statistics import StatisticsConfig


@register(
    "bn",
    Settings(statistics=StatisticsConfig("batch")),
    Traits(
        paper="Nado et al. 2020; Schneider et al. 2020",
        updates="normalization statistics",
        norms="BatchNorm; others stay as they are",
        passes="1 forward",
    ),
)
class BatchNormOnly(Adapter):
    """The source model on the target's normalization statistics, no update.

    Batch statistics, the stream's average, or a blend of the batch's with the source's: no gradient is taken.
    """

    still = True
    takes_steps = False
    steady = True

    def adapt(self, x: Tensor) -> Tensor:
        """Return the source model's logits on the batch's, or the stream's, statistics."""
        return predict(self, x)[1]
