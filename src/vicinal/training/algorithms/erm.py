"""Empirical risk minimisation: cross-entropy over all source domains."""

from torch.nn import functional as F

from vicinal.data.episodes import Batch, from_all
from vicinal.training.learner import ALGORITHMS, Learner, Stage, Terms


def erm_step(learner: Learner, batches: tuple[Batch, ...]) -> Terms:
    """Take one step on a domain-balanced batch."""
    ((x, y),) = batches
    loss = F.cross_entropy(learner.model(x), y, label_smoothing=learner.config.label_smoothing)
    learner.optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    learner.optimizer.step()
    return {"classify": loss.detach()}


ERM = Stage("erm", from_all, erm_step)
ALGORITHMS.register("erm")((ERM,))
