"""Soft pseudo labels: entropy minimisation, Eq. (1)."""

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import optimizer_for, predict, update
from vicinal.adapters.settings import Settings
from vicinal.checkpoint import Trained
from vicinal.functional.losses import prediction_entropy


@register("soft", Settings(), Traits(paper="Grandvalet and Bengio 2005; Ambekar et al. 2024, Eq. (1)"))
class Soft(Adapter):
    """The model's own prediction is the label: its entropy is minimised; all parameters updated.

    Loss: H(p) = -sum_c p_c log p_c, a mean over the batch, p the softmax of the logits. Prediction after the
    update.
    """

    steady = True

    def prepare(self, source: Trained) -> None:
        """Set up the optimizer."""
        self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Lower the entropy of the predictions, then predict."""
        for _ in range(self.settings.steps):
            update(self, x, lambda z, logits: prediction_entropy(logits))
        return predict(self, x)[1]
