"""No adaptation at all."""

from torch import Tensor

from vicinal.adapters.contract import Adapter, Settings, register
from vicinal.adapters.passes import predict
from vicinal.adapters.statistics import StatisticsConfig


@register("erm", Settings(statistics=StatisticsConfig("source")))
class Erm(Adapter):
    """The source model as it is: source statistics, no update."""

    def adapt(self, x: Tensor) -> Tensor:
        """Return the source model's logits."""
        return predict(self, x)[1]
