"""Soft pseudo labels: entropy minimisation, Eq. (1)."""

from torch import Tensor

from vicinal.adapters.contract import Adapter, Settings, register
from vicinal.adapters.passes import optimizer_for, predict, update
from vicinal.checkpoint import Trained
from vicinal.functional.losses import prediction_entropy


@register("soft", Settings())
class Soft(Adapter):
    """The model's own prediction is the label: its entropy is minimised; all parameters updated."""

    def prepare(self, source: Trained) -> None:
        """Set up the optimizer."""
        self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Lower the entropy of the predictions, then predict."""
        for _ in range(self.settings.steps):
            update(self, x, lambda z, logits: prediction_entropy(logits))
        return predict(self, x)[1]
