"""How sure a model is of images from its own domains: what the sureness of others can be compared by."""

import math
from collections.abc import Iterable, Sequence

import torch

from vicinal.checkpoint import Trained
from vicinal.data.domains import LabelledImages, SourceDomain
from vicinal.data.transforms import to_float
from vicinal.functional.calibration import fitted_temperature
from vicinal.models.classifier import Classifier

AT_ONCE = 256  # images of a pass
NAME = "validation_temperature"  # in the provenance of a model, and in a choice: that of the left-out models


def validation_temperature(model: Classifier, sources: Sequence[SourceDomain]) -> float | None:
    """Return the temperature of a model on validation images of its sources; None without any."""
    parts = [source.val for source in sources if len(source.val)]
    if not parts:
        return None
    return fitted_temperature(
        [_probabilities(model, part) for part in parts], [part.labels for part in parts]
    )


@torch.no_grad()
def _probabilities(model: Classifier, part: LabelledImages) -> torch.Tensor:
    model.eval()
    device = next(model.parameters()).device
    starts = range(0, len(part), AT_ONCE)
    return torch.cat(
        [model(to_float(part.images[start : start + AT_ONCE], device)).softmax(-1) for start in starts]
    )


def mean_temperature(models: Iterable[Trained]) -> float | None:
    """Return the mean of models' temperatures on their own domains, of their logarithms; None without any."""
    found = [model.provenance.get(NAME) for model in {id(model): model for model in models}.values()]
    known = [float(value) for value in found if value is not None]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None
