"""p_phi and q_phi: the distribution of the latent classifier, from a batch and labels of it."""

from collections.abc import Callable

from torch import Tensor

from vicinal.functional.labels import class_means
from vicinal.types import GaussianW, Head

Phi = Callable[[Tensor, Head, Tensor], GaussianW]


def prior(phi: Phi, z: Tensor, y_pseudo: Tensor, head: Head) -> GaussianW:
    """Return p_phi(w | X): class means are taken under the model's own predictions, Eq. (5)."""
    means, present = class_means(z, y_pseudo)
    return phi(means, head, present)


def posterior(phi: Phi, z: Tensor, y_true: Tensor, head: Head) -> GaussianW:
    """Return q_phi(w | X, Y): class means are taken under the true labels, in training only, Eq. (6)."""
    means, present = class_means(z, y_true)
    return phi(means, head, present)
