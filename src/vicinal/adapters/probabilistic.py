"""Pseudo labels as stochastic variables, Eq. (3)."""

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import optimizer_for, predict, train_on_labels
from vicinal.adapters.settings import Settings
from vicinal.checkpoint import Trained
from vicinal.functional.labels import probabilistic_labels


@register("probabilistic", Settings(), Traits(paper="Ambekar et al. 2024, Eq. (3)"))
class Probabilistic(Adapter):
    """One-hot draws from the predicted categorical are the labels; all parameters updated.

    Loss: cross-entropy with the mean of `num_samples` one-hot draws from p. Prediction after the update.
    """

    def prepare(self, source: Trained) -> None:
        """Set up the optimizer."""
        self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Update by the labels, then predict."""
        draws = max(self.settings.num_samples, 1)
        train_on_labels(self, x, lambda z, logits: probabilistic_labels(logits, draws, self.generator))
        return predict(self, x)[1]
