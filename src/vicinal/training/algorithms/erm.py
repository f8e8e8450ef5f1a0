"""Empirical risk minimisation: cross-entropy over all source domains."""

from collections.abc import Sequence

from torch.nn import functional as F

from vicinal.data.domains import SourceDomain
from vicinal.data.episodes import draw_batch
from vicinal.training.learner import ALGORITHMS, Learner, Stage, Terms


def erm_step(learner: Learner, sources: Sequence[SourceDomain]) -> Terms:
    """Take one step on a domain-balanced batch, as many images as the two batches of a meta iteration."""
    config = learner.config
    parts = [source.train for source in sources]
    x, y = draw_batch(parts, 2 * config.batch_size, learner.draws, learner.device, config.augment)
    loss = F.cross_entropy(learner.model(x), y, label_smoothing=config.label_smoothing)
    learner.optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    learner.optimizer.step()
    return {"classify": loss.detach()}


ERM = Stage("erm", erm_step)
ALGORITHMS.register("erm")((ERM,))
