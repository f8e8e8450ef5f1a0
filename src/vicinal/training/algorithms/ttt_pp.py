"""TTT++: ERM with a contrastive head beside the classifier; the source's feature moments are kept."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.adapters.ttt_pp import CONTRAST_VIEW, TttPlusSettings
from vicinal.data.domains import SourceDomain
from vicinal.data.episodes import Batch, from_all
from vicinal.data.transforms import to_float
from vicinal.functional.peers_consistency import contrastive_loss, feature_moments, moment_distances
from vicinal.models.auxiliary import as_extras, projection_head
from vicinal.models.classifier import Classifier
from vicinal.training.algorithms.ttt import untracked
from vicinal.training.config import TrainConfig
from vicinal.training.learner import ALGORITHMS, Learner, Stage, Terms

TEMPERATURE = TttPlusSettings.temperature
PART = 256  # images a part of the source has, whose moments are compared with the whole's
LEAST_PARTS = 4


def make_head(model: Classifier, config: TrainConfig) -> nn.Module:
    """Return a contrastive head for the model's features."""
    return projection_head(model.head.in_features)


def ttt_pp_step(learner: Learner, batches: tuple[Batch, ...]) -> Terms:
    """Take one step on classes and on telling two views of an image from those of others, weighted alike."""
    ((x, y),) = batches
    head = learner.auxiliary
    assert head is not None
    views = torch.cat([CONTRAST_VIEW(x, learner.noise) for _ in range(2)])
    classify = F.cross_entropy(learner.model(x), y, label_smoothing=learner.config.label_smoothing)
    with untracked(learner.model):
        first, second = head(learner.model.embed(views)).chunk(2)
    contrast = contrastive_loss(first, second, TEMPERATURE)
    learner.optimizer.zero_grad(set_to_none=True)
    (classify + contrast).backward()  # type: ignore[no-untyped-call]
    learner.optimizer.step()
    return {"classify": classify.detach(), "contrast": contrast.detach()}


@torch.no_grad()
def keep_moments(learner: Learner, sources: Sequence[SourceDomain]) -> dict[str, Tensor]:
    """Return the head, and moments of features and projections over all training images of the sources."""
    head = learner.auxiliary
    assert head is not None
    head.eval()
    images = [source.train.images for source in sources]
    z = torch.cat(
        [
            learner.model.embed(to_float(part[start : start + PART], learner.device))
            for part in images
            for start in range(0, len(part), PART)
        ]
    )
    found = as_extras("ttt_pp.head", head)
    for name, value in (("features", z), ("projection", head(z))):
        found |= {f"ttt_pp.{name}.{what}": number for what, number in _moments(value).items()}
    return found


def _moments(value: Tensor) -> dict[str, Tensor]:
    """Return mean, covariance, and how far random parts are from them on average."""
    whole = feature_moments(value)
    # Domains come one after the other: parts of them in order would differ by more than chance.
    order = torch.randperm(len(value), generator=torch.Generator().manual_seed(0)).to(value.device)
    size = max(2, min(PART, len(value) // LEAST_PARTS))
    parts = [part for part in torch.split(value[order], size) if len(part) == size] or [value]
    apart = torch.stack([moment_distances(whole, feature_moments(part)) for part in parts]).mean(0)
    tiny = torch.finfo(value.dtype).tiny
    return {**whole._asdict(), "distances": apart.clamp_min(tiny)}


TTT_PP = Stage("ttt_pp", from_all, ttt_pp_step, auxiliary=make_head, finish=keep_moments)
ALGORITHMS.register("ttt_pp")((TTT_PP,))
