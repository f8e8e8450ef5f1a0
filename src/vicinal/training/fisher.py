"""What `eata` needs of the sources: the Fisher information of the normalization layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vicinal.adapters.eata import FISHER_BATCH, FISHER_IMAGES, fisher_information
from vicinal.adapters.passes import chosen_parameters
from vicinal.data.domains import SourceDomain
from vicinal.data.pixels import joined
from vicinal.data.transforms import to_float
from vicinal.models.classifier import Classifier


def validation_fisher(
    model: Classifier, sources: Sequence[SourceDomain], at_once: int, seed: int
) -> dict[str, Tensor]:
    """Return the Fisher information of a model's norm layers on validation images of all sources.

    Their labels are not looked at. Batches are mixed over the domains by draws of their own, and never hold
    more images than training takes `at_once`: what fits there fits here. Nothing for a net without norm
    layers.
    """
    if not any(True for _ in chosen_parameters(model, "norm")):
        return {}
    images, device = joined([source.val.images for source in sources]), next(model.parameters()).device
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:FISHER_IMAGES]
    parts = torch.split(order, min(FISHER_BATCH, at_once))
    return fisher_information(model, (to_float(images[part], device) for part in parts))
