"""ERM, then the paper's phi on the fixed source model: neighbor labels without meta-generalization."""

import torch

from vicinal.data.episodes import Batch, from_one
from vicinal.functional.losses import label_cross_entropy
from vicinal.training.algorithms.erm import ERM
from vicinal.training.learner import ALGORITHMS, Learner, Stage, Terms
from vicinal.training.meta import features_and_logits, posterior_labels


def neighbor_step(learner: Learner, batches: tuple[Batch, ...]) -> Terms:
    """Move phi by the cross-entropy of its labels plus KL[q || p] on one domain's batch; theta stays."""
    config, model, phi = learner.config, learner.model, learner.phi
    assert phi is not None
    ((x, y),) = batches
    with torch.no_grad():
        z, logits = features_and_logits(model, dict(model.named_parameters()), dict(model.named_buffers()), x)
    labels = posterior_labels(phi, z, logits, y, model.linear, config, learner.noise)
    label, kl = label_cross_entropy(labels.y_hat, y), config.kl_weight * labels.kl
    learner.optimizer.zero_grad(set_to_none=True)
    (label + kl).backward()  # type: ignore[no-untyped-call]
    learner.optimizer.step()
    return {"label": label.detach(), "kl": kl.detach()}


PHI = Stage("phi", from_one, neighbor_step, uses_phi=True, fixed_model=True)
ALGORITHMS.register("neighbor")((ERM, PHI))
