"""Variational neighbor labels as the paper has them: Algorithm 1 in training, Algorithm 2 here."""

import copy

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.neighbor import adapt_by_phi, trained_phi
from vicinal.adapters.passes import optimizer_for
from vicinal.adapters.settings import Settings
from vicinal.checkpoint import Trained


@register(
    "vnl_paper",
    Settings(),
    Traits(paper="Ambekar et al. 2024", training="Algorithm 1 (--algorithm meta)"),
)
class VnlPaper(Adapter):
    """Neighbor labels from the meta-trained phi: Algorithm 2 as the paper has it.

    Loss: cross-entropy with labels from draws of w ~ p_phi(w | X), class means under the model's own
    predictions. All parameters are updated; prediction after the update, or by the labels.
    """

    steady = True
    predicts = ("own", "labels")

    def prepare(self, source: Trained) -> None:
        """Take phi over and set up the optimizer."""
        self.phi = copy.deepcopy(trained_phi(source, "meta", "vnl_paper"))
        self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Update by the labels, then predict."""
        return adapt_by_phi(self, self.phi, x)
