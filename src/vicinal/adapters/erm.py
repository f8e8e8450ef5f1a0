"""No adaptation at all."""

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import predict
from vicinal.adapters.settings import Settings
from vicinal.adapters.statistics import StatisticsConfig


@register(
    "erm",
    Settings(statistics=StatisticsConfig("source")),
    Traits(paper="Vapnik 1999", updates="nothing", batch_of_one="as any batch", passes="1 forward"),
)
class Erm(Adapter):
    """The source model as it is: source statistics, no update.

    What every other method is measured against: empirical risk minimisation over all source domains.
    """

    still = True
    takes_steps = False
    steady = True

    def adapt(self, x: Tensor) -> Tensor:
        """Return the source model's logits."""
        return predict(self, x)[1]
