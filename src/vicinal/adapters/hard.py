"""Pseudo labels of the common kind."""

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import optimizer_for, predict, train_on_labels
from vicinal.adapters.settings import Settings
from vicinal.checkpoint import Trained
from vicinal.functional.labels import hard_labels


@register("hard", Settings(), Traits(paper="Lee 2013; Ambekar et al. 2024, Eq. (1)"))
class Hard(Adapter):
    """The argmax of the model's own prediction is the label; all parameters updated.

    Loss: -log p_k with k the argmax of p, a mean over the batch. Prediction after the update.
    """

    steady = True

    def prepare(self, source: Trained) -> None:
        """Set up the optimizer."""
        self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Update by the labels, then predict."""
        train_on_labels(self, x, lambda z, logits: hard_labels(logits))
        return predict(self, x)[1]
