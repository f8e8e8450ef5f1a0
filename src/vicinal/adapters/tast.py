"""TAST: random heads on frozen features learn the labels of nearest neighbors."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import as_logits, predict, take_step
from vicinal.adapters.settings import Predict
from vicinal.adapters.supports import SupportSettings, add, one_hot, seed
from vicinal.checkpoint import Trained
from vicinal.errors import ConfigError
from vicinal.functional.losses import soft_cross_entropy
from vicinal.functional.peers_prototypes import nearest_supports, prototype_logits

TRAITS = Traits(
    paper="Jang et al. 2023",
    updates="an ensemble of projection heads; the model stays",
    batch_of_one="as any other batch",
    passes="1 forward; forward and backward of the heads",
)


@dataclass(frozen=True)
class TastSettings(SupportSettings):
    """What `tast` can be told besides what methods with supports can."""

    predict: Predict = "before"  # before the last update, as in the authors' code
    lr: float = 1e-3  # the paper's, with Adam
    heads: int = 20  # size of the ensemble; the paper's, from the code's choices 1, 5, 10, 20
    reduction: int = 4  # features are projected to a quarter of their number; the authors' code
    # Supports that label an image, never more than a class can have; from the code's choices 1, 2, 4, 8.
    neighbors: int = 4
    scale: float = 10.0  # of cosines before the softmax; tau of the authors' code

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads < 1 or self.reduction < 1 or self.neighbors < 1 or not self.scale > 0:
            raise ConfigError("tast needs heads, reduction and neighbors of at least 1 and a scale above 0")
        if self.optimizer != "adam":
            raise ConfigError("tast trains its heads with adam")


class ProjectionHeads(nn.Module):
    """Random projections that share one matrix, a BatchEnsemble: u = gamma * (V (alpha * z)) + beta."""

    def __init__(
        self, heads: int, features: int, projected: int, like: Tensor, draw: torch.Generator
    ) -> None:
        super().__init__()

        def normal(*shape: int) -> nn.Parameter:  # Kaiming's
            noise = torch.randn(shape, generator=draw, device=like.device, dtype=like.dtype)
            return nn.Parameter(math.sqrt(2 / shape[-1]) * noise)

        self.weight = normal(projected, features)
        self.alpha = normal(heads, features)
        self.gamma = normal(heads, projected)
        self.beta = nn.Parameter(torch.zeros_like(self.gamma))

    def forward(self, z: Tensor) -> Tensor:
        """Return the projections (E, N, p) of features (N, d)."""
        shared = (z * self.alpha.unsqueeze(1)) @ self.weight.T
        return shared * self.gamma.unsqueeze(1) + self.beta.unsqueeze(1)


@register("tast", TastSettings(), TRAITS)
class Tast(Adapter):
    """Heads on frozen features learn the labels of each image's nearest supports, and vote by them.

    Jang, Chung and Chung, Test-Time Adaptation via Self-Training with Nearest Neighbor Information, ICLR
    2023. Supports as in `t3a`, seeded with the classifier's rows. Each of `heads` random projections u gives
    every support s a label by prototypes, y(s) = softmax(scale * cos(u(s), mean of u over each class)). An
    image's neighbors are its `neighbors` nearest supports by the cosine of z. For every head

        target = mean over neighbors of the one-hot argmax of y(s),
        L = (1/N) sum_i KL(target_i || softmax(scale * cos(u(z_i), class means of u))),

    summed over the heads.

    Updated: the heads, by Adam 1e-3.
    Prediction: the mean over heads and neighbors of y(s), from before the last update ("own": from after it),
    returned as its logarithm.
    Statistics: the source's (evaluation mode).
    Defaults: Adam 1e-3, scale 10, heads to a quarter of the features, drawn by Kaiming's rule, and prediction
    before the last update by the authors' code; 20 heads, `per_class`, `neighbors` and one step (or 3) are
    among what it chooses from by source validation. There are never more neighbors than supports of a class:
    `per_class`, or where all are kept the supports over the classes.

    Departs: the code averages KL over classes too, which to Adam is the same, and gives a class without
    supports a cosine of 0; here it is not predicted. With `per_class` -1 the memory grows with the stream.
    """

    still = True
    predicts = ("own", "before")
    needs_features = True
    own_scale = True
    settings: TastSettings

    def prepare(self, source: Trained) -> None:
        """Start from the classifier's rows and random heads."""
        self.model.requires_grad_(False)
        seed(self)
        rows, settings = self.model.linear.weight, self.settings
        self.classes, features = rows.shape
        projected = max(1, features // settings.reduction)
        self.heads = ProjectionHeads(settings.heads, features, projected, rows, self.generator)
        self.optimizer = torch.optim.Adam(self.heads.parameters(), lr=settings.lr)

    def adapt(self, x: Tensor) -> Tensor:
        """Train the heads on the labels of neighbors, and predict by those labels."""
        z, logits = predict(self, x)
        add(self, z, logits, self.settings.per_class)
        supports = self.memory["supports"]
        count = neighbor_count(self.settings.neighbors, self.settings.per_class, len(supports), self.classes)
        nearest = nearest_supports(z, supports, count)[1]
        view = self._view(x, z)
        for _ in range(self.settings.steps):
            y = self._learn(view, nearest)
        if self.settings.predict == "own":
            with torch.no_grad():
                y = self._label(self.heads(self.memory["supports"]), nearest)[1]
        return as_logits(y)

    def _view(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the features that the heads are trained on."""
        if self.settings.augment is None:
            return z
        view = self.settings.augment(x, self.generator)
        with torch.no_grad(), self.norm.predicting(len(x)):
            return self.model.features_and_logits(view)[0]

    def _learn(self, view: Tensor, nearest: Tensor) -> Tensor:
        """Take one step of the heads and return the prediction from before it."""
        assert self.optimizer is not None
        projected = self.heads(self.memory["supports"])
        with torch.no_grad():
            targets, y = self._label(projected, nearest)
        labels = one_hot(self, self.classes)
        logits = prototype_logits(self.heads(view), projected, labels, self.settings.scale)
        # KL less the entropy of its targets, which has no gradient; a sum over heads, a mean over images.
        loss = self.settings.heads * soft_cross_entropy(logits, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        take_step(self)
        return y

    def _label(self, projected: Tensor, nearest: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets (E, N, C) of each head and the prediction (N, C) of all."""
        labels = one_hot(self, self.classes)
        return neighbor_votes(prototype_logits(projected, projected, labels, self.settings.scale), nearest)


def neighbor_count(neighbors: int, per_class: int, supports: int, classes: int) -> int:
    """Return how many supports label an image: at most as many as a class can have, or has on average."""
    most = supports // classes if per_class == -1 else per_class
    return max(1, min(neighbors, most))


def neighbor_votes(logits: Tensor, nearest: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the supports nearest (N, k) to each image say by their logits (E, M, C).

    First the mean of their one-hot argmax (E, N, C), then that of their probabilities, over heads too (N, C).
    """
    hard = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    return hard[:, nearest].mean(2), logits.softmax(-1)[:, nearest].mean(2).mean(0)
