"""TTT: ERM with a rotation head that learns beside the classifier, on the same features."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.adapters.layers import batch_norms, running
from vicinal.data.domains import SourceDomain
from vicinal.data.episodes import Batch, from_all
from vicinal.functional.peers_consistency import quarter_turns
from vicinal.models.auxiliary import ROTATIONS, as_extras, rotation_head
from vicinal.models.classifier import Classifier
from vicinal.training.config import TrainConfig
from vicinal.training.learner import ALGORITHMS, Learner, Stage, Terms


def untracked(model: nn.Module) -> AbstractContextManager[None]:
    """Keep passes from the running statistics.

    Departs from the authors' code: what the model is to predict are plain images, and running statistics that
    are half those of turned or recoloured ones do not fit them.
    """
    return running(batch_norms(model), on_batch=True)


def make_head(model: Classifier, config: TrainConfig) -> nn.Module:
    """Return a rotation head for the model's features."""
    return rotation_head(model.head.in_features)


def ttt_step(learner: Learner, batches: tuple[Batch, ...]) -> Terms:
    """Take one step on classes and, by the same images turned at random, on rotations; both count alike."""
    ((x, y),) = batches
    head = learner.auxiliary
    assert head is not None
    turns = torch.randint(ROTATIONS, (len(x),), generator=learner.noise, device=x.device)
    classify = F.cross_entropy(learner.model(x), y, label_smoothing=learner.config.label_smoothing)
    # A pass of its own, as in the authors' code: classes are learned on the statistics of upright images.
    with untracked(learner.model):
        rotate = F.cross_entropy(head(learner.model.embed(quarter_turns(x, turns))), turns)
    learner.optimizer.zero_grad(set_to_none=True)
    (classify + rotate).backward()  # type: ignore[no-untyped-call]
    learner.optimizer.step()
    return {"classify": classify.detach(), "rotate": rotate.detach()}


def keep_head(learner: Learner, sources: Sequence[SourceDomain]) -> dict[str, Tensor]:
    """Return the rotation head for the checkpoint."""
    assert learner.auxiliary is not None
    return as_extras("ttt", learner.auxiliary)


TTT = Stage("ttt", from_all, ttt_step, auxiliary=make_head, finish=keep_head)
ALGORITHMS.register("ttt")((TTT,))
