"""TAST-BN: the scale and shift of normalization layers learn the labels of nearest neighbors."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import as_logits, look, optimizer_for, take_step
from vicinal.adapters.settings import Parameters, Predict
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.adapters.supports import SupportSettings, add, one_hot
from vicinal.adapters.tast import neighbor_count, neighbor_votes
from vicinal.checkpoint import Trained
from vicinal.errors import ConfigError
from vicinal.functional.losses import soft_cross_entropy
from vicinal.functional.peers_prototypes import nearest_supports, prototype_logits

TRAITS = Traits(
    paper="Jang et al. 2023",
    updates="scale and shift of normalization layers",
    norms="any, but at least one",
    passes="2 forward, 1 backward; of the batch and of up to 150 supports",
)


@dataclass(frozen=True)
class TastBNSettings(SupportSettings):
    """What `tast_bn` can be told besides what methods with supports can."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("batch"))
    predict: Predict = "before"  # before the last update, as in the authors' code
    lr: float = 1e-3  # the paper's, with Adam
    parameters: Parameters = "norm"
    # Supports that label an image, never more than a class can have; from the code's choices 1, 2, 4, 8.
    neighbors: int = 4
    scale: float = 10.0  # of cosines before the softmax; tau of the authors' code
    support_limit: int = 150  # images kept in all, an equal share for each class; the authors' code

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neighbors < 1 or not self.scale > 0 or self.support_limit < 1:
            raise ConfigError("tast_bn needs neighbors and support_limit of at least 1 and a scale above 0")


@register("tast_bn", TastBNSettings(), TRAITS)
class TastBN(Adapter):
    """Normalization layers learn the labels of each image's nearest supports, which also predict.

    Jang, Chung and Chung, Test-Time Adaptation via Self-Training with Nearest Neighbor Information, ICLR
    2023: `tast` without heads. Features change with every update, so the supports are images; there is none
    at the start. In each step batch and supports pass through the network together. With z their features,
    y(s) = softmax(scale * cos(z(s), class means of the supports)), and the neighbors of an image its nearest
    supports,

        target = mean over neighbors of the one-hot argmax of y(s),
        L = (1/N) sum_i KL(target_i || softmax(scale * cos(z_i, class means))).

    Updated: scale and shift of normalization layers, by Adam 1e-3.
    Prediction: the mean of y(s) over the neighbors, from before the last update ("own": from after it),
    returned as its logarithm.
    Statistics: of the batch and the supports together; a single image runs on the average over the stream,
    and so do its supports.
    Defaults: Adam 1e-3, scale 10, prediction, statistics and at most 150 supports in all by the authors'
    code; `per_class` (1, 5 or 20), `neighbors` and one step (or 3) are among what it chooses from by source
    validation. There are never more neighbors than supports of a class.

    Departs: the limit of 150 also holds where `per_class` is -1, which the code does not offer. The code
    averages KL over classes too, which to Adam is the same, gives a class without supports a cosine of 0
    (here it is not predicted) and knows BatchNorm alone.
    """

    predicts = ("own", "before")
    needs_features = True
    own_scale = True
    settings: TastBNSettings

    def prepare(self, source: Trained) -> None:
        """Set up the optimizer; there are no supports yet."""
        self.classes = len(self.model.linear.weight)
        share = max(1, self.settings.support_limit // self.classes)
        wanted = self.settings.per_class
        self.per_class = share if wanted == -1 else min(wanted, share)
        self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Let the batch join the supports, learn the labels of neighbors, and predict by those labels."""
        settings = self.settings
        add(self, x, look(self, x)[1], self.per_class)
        same = settings.augment is None and self.norm.one_pass(len(x))
        for step in range(settings.steps):
            early = settings.predict == "before" and step == settings.steps - 1
            settled = self._predict(x) if early and not same else None
            y = self._learn(x)
            y = y if settled is None else settled
        return as_logits(self._predict(x) if settings.predict == "own" else y)

    @torch.no_grad()
    def _predict(self, x: Tensor) -> Tensor:
        self.norm.settle(self.model, x)
        with self.norm.predicting(len(x)):
            z, supports = self._features(x)
        return self._label(z, supports)[1]

    def _learn(self, x: Tensor) -> Tensor:
        """Take one step and return what the neighbors said before it."""
        assert self.optimizer is not None
        augment = self.settings.augment
        with self.norm.updating(len(x), views=0):  # the supports beside the batch
            z, supports = self._features(x if augment is None else augment(x, self.generator))
        with torch.no_grad():
            clean = z if augment is None else self._clean(x)
            targets, y = self._label(clean, supports)
        logits = prototype_logits(z, supports, one_hot(self, self.classes), self.settings.scale)
        self.optimizer.zero_grad(set_to_none=True)
        soft_cross_entropy(logits, targets).backward()  # type: ignore[no-untyped-call]
        take_step(self)
        return y

    def _clean(self, x: Tensor) -> Tensor:
        with self.norm.updating(len(x), views=0):
            return self._features(x)[0]

    def _features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of a batch and of the supports from one pass."""
        joined = torch.cat([x, self.memory["supports"]])
        z = self.model.features_and_logits(joined)[0]
        return z[: len(x)], z[len(x) :]

    def _label(self, z: Tensor, supports: Tensor) -> tuple[Tensor, Tensor]:
        """Return targets and prediction (N, C) by the supports nearest to each feature."""
        labels = one_hot(self, self.classes)
        count = neighbor_count(self.settings.neighbors, self.per_class, len(supports), self.classes)
        nearest = nearest_supports(z, supports, count)[1]
        votes = prototype_logits(supports, supports, labels, self.settings.scale).unsqueeze(0)
        targets, y = neighbor_votes(votes, nearest)
        return targets[0], y
