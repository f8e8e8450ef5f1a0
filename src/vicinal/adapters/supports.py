"""The supports of a stream: of each predicted class, what was seen with the lowest entropy."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.adapters.contract import Adapter
from vicinal.adapters.settings import Settings
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.errors import ConfigError
from vicinal.functional.losses import entropies
from vicinal.functional.peers_prototypes import lowest_entropy

PARTS = ("supports", "labels", "entropy")


@dataclass(frozen=True)
class SupportSettings(Settings):
    """What methods that keep supports can be told besides what every method can."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("source"))
    # Supports kept of each class, those of lowest entropy; -1: all. The papers choose from 1, 5, 20, 50, 100
    # and all by source validation; 20 is the middle of what they choose from.
    per_class: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_class < 1 and self.per_class != -1:
            raise ConfigError(f"per_class must be at least 1, or -1 for all, not {self.per_class}")


def seed(adapter: Adapter) -> None:
    """Start the supports with the rows of the classifier, labelled by what it takes each of them for.

    That is a row's own class in any trained classifier; T3A's paper says so, its code asks.
    """
    head = adapter.model.linear
    logits = head.weight @ head.weight.T + head.bias
    values = (head.weight.clone(), logits.argmax(-1), entropies(logits))
    adapter.memory.update(zip(PARTS, values, strict=True))


@torch.no_grad()
def add(adapter: Adapter, supports: Tensor, logits: Tensor, per_class: int, **more: Tensor) -> None:
    """Add a batch under the labels that `logits` give it, then drop all but the lowest entropies of a class.

    `more` is kept along with the supports, by name; it must be there from the start or added every time.
    """
    new = dict(zip(PARTS, (supports, logits.argmax(-1), entropies(logits)), strict=True)) | more
    memory = adapter.memory
    joined = {
        name: torch.cat([memory[name], value]) if name in memory else value for name, value in new.items()
    }
    kept = lowest_entropy(joined["labels"], joined["entropy"], per_class)
    memory.update({name: value[kept] for name, value in joined.items()})


def one_hot(adapter: Adapter, classes: int) -> Tensor:
    """Return the labels of the supports as (M, C) in the precision of their entropies."""
    return F.one_hot(adapter.memory["labels"], classes).to(adapter.memory["entropy"].dtype)
