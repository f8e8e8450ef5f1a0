"""Adapted statistics alone: much of what test-time methods claim is only this."""

from torch import Tensor

from vicinal.adapters.contract import Adapter, Settings, register
from vicinal.adapters.passes import predict
from vicinal.adapters.statistics import StatisticsConfig


@register("bn", Settings(statistics=StatisticsConfig("batch")))
class BatchNormOnly(Adapter):
    """The source model on the target's normalization statistics, no update."""

    def adapt(self, x: Tensor) -> Tensor:
        """Return the source model's logits on the batch's, or the stream's, statistics."""
        return predict(self, x)[1]
