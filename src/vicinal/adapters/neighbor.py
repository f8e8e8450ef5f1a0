"""Neighbor labels by the paper's phi: Algorithm 2, with phi from either way of training it."""

import copy

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import as_logits, optimizer_for, predict, train_on_labels
from vicinal.adapters.settings import Settings
from vicinal.checkpoint import Trained
from vicinal.errors import AdapterError
from vicinal.functional.inference import prior
from vicinal.functional.labels import hard_labels, neighbor_draws, neighbor_labels
from vicinal.models.inference import InferenceNet


def trained_phi(source: Trained, algorithm: str, method: str) -> InferenceNet:
    """Return the phi that `algorithm` trained, or say how to get one."""
    if source.phi is None or source.algorithm != algorithm:
        raise AdapterError(
            f"method '{method}' needs a model trained with --algorithm {algorithm}; "
            f"this one was trained with '{source.algorithm}'"
        )
    return source.phi


def prior_labels(adapter: Adapter, phi: InferenceNet, z: Tensor, logits: Tensor) -> Tensor:
    """Return y_hat from draws of w ~ p_phi(w | X), class means under the predictions; Algorithm 2, line 4."""
    w = prior(phi, z, hard_labels(logits), adapter.model.linear)
    if adapter.settings.num_samples == 0:
        return neighbor_labels(z, w, 0)
    adapter.draws = neighbor_draws(z, w, adapter.settings.num_samples, adapter.generator)
    return adapter.draws.mean(0)


def adapt_by_phi(adapter: Adapter, phi: InferenceNet, x: Tensor) -> Tensor:
    """Update by neighbor labels and predict; or, when told to predict by labels, predict with them alone."""
    if adapter.settings.predict == "labels":
        return as_logits(prior_labels(adapter, phi, *predict(adapter, x)))
    train_on_labels(adapter, x, lambda z, logits: prior_labels(adapter, phi, z, logits))
    return predict(adapter, x)[1]


@register(
    "neighbor",
    Settings(),
    Traits(
        paper="Ambekar et al. 2024, ablation", training="phi on the fixed source model (--algorithm neighbor)"
    ),
)
class Neighbor(Adapter):
    """Neighbor labels from a phi trained on a fixed source model, without meta-generalization.

    Loss: cross-entropy with labels from draws of w ~ p_phi(w | X). All parameters are updated; prediction
    after the update, or by the labels.
    """

    steady = True
    predicts = ("own", "labels")

    def prepare(self, source: Trained) -> None:
        """Take phi over and set up the optimizer."""
        self.phi = copy.deepcopy(trained_phi(source, "neighbor", "neighbor"))
        self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Update by the labels, then predict."""
        return adapt_by_phi(self, self.phi, x)
