"""A teacher that follows the model it teaches, with normalization statistics of its own."""

import torch
from torch import Tensor, nn

from vicinal.adapters.contract import Adapter
from vicinal.adapters.statistics import NormStatistics, StatisticsConfig
from vicinal.data.augment import Augment
from vicinal.models.classifier import Classifier
from vicinal.models.wrap import Wrapped, copied

# The colours and the flip are those that the code of CoTTA and RoTTA draws; the crop stands for its affine
# map, which scales by 0.9 to 1.1. Departs from them: no gamma, rotation, blur and noise.
STRONG_VIEW = Augment(0.81, 1.0, flip=True, brightness=0.4, contrast=0.3, saturation=0.5, hue=0.06)


class Follower(nn.Module):
    """A copy of a model that takes no gradient."""

    model: Classifier | Wrapped

    def __init__(
        self, model: Classifier | Wrapped, statistics: StatisticsConfig, beside: NormStatistics
    ) -> None:
        super().__init__()
        self.model = copied(model).eval().requires_grad_(False)
        self.norm = NormStatistics(self.model, statistics, beside)

    @torch.no_grad()
    def settle(self, x: Tensor) -> None:
        """Take a batch into the statistics that predictions run on."""
        self.norm.begin(x)
        self.norm.settle(self.model, x)

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits on the statistics that predictions run on."""
        with self.norm.predicting(len(x)):
            return self.model.features_and_logits(x)

    @torch.no_grad()
    def look(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits on the statistics that updates run on."""
        with self.norm.updating(len(x)):
            return self.model.features_and_logits(x)

    @torch.no_grad()
    def follow(self, model: nn.Module, weight: float) -> None:
        """Move toward a model: theta' + weight (theta - theta'), all parameters."""
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), weight)
        self.norm.moved()

    def carry(self, x: Tensor) -> None:
        """Carry the statistics along with what it has followed since the batch was taken in."""
        self.norm.carry(self.model, x)


def report(adapter: Adapter, follower: Follower, z: Tensor, logits: Tensor) -> Tensor:
    """Return the logits after whoever watches the predictions has seen them."""
    adapter.show(z, logits, follower.model)
    return logits
