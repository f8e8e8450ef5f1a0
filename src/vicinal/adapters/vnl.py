"""vnl: anchored out-of-fold neighbor labels on stream statistics, the default method.

Departs from the paper in five ways, each measured (docs/experiments.md): phi is fitted on predictions of
models that never saw the domain it labels; the labels that teach the model come from a frozen source model,
the anchor, so that the model cannot run away from itself; after each step the model goes back toward the
source a little, so that a long stream does not carry it away; predictions run on stream statistics; and the
updated model's batch is predicted by neighbor labels of its own. Which of these is used was chosen on
left-out domains.
"""

import copy
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter, Predict, Settings, Traits, register
from vicinal.adapters.labeler import StreamLabeler
from vicinal.adapters.passes import as_logits, optimizer_for, predict, update
from vicinal.adapters.statistics import NormStatistics, StatisticsConfig
from vicinal.checkpoint import Trained
from vicinal.errors import AdapterError, ConfigError
from vicinal.functional.losses import prediction_entropy, soft_cross_entropy
from vicinal.models.inference import StreamInferenceNet

Update = Literal["anchored", "entropy", "none"]


@dataclass(frozen=True)
class VnlSettings(Settings):
    """What `vnl` can be told besides what every method can."""

    statistics: StatisticsConfig = field(default_factory=StatisticsConfig)
    predict: Predict = "labels"
    pull: float = 0.02  # see docs/experiments.md, section 14
    update: Update = "anchored"  # anchored labels plus entropy, entropy alone, or no update
    anchor_weight: float = 1.0  # weight of the cross-entropy with the anchor's labels
    entropy_weight: float = 1.0  # weight of the entropy of the model's own predictions
    follow: float = 0.0  # how far the anchor moves toward the model after each batch

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update not in ("anchored", "entropy", "none"):
            raise ConfigError(f"unknown update '{self.update}': choose from anchored, entropy, none")
        if not 0 <= self.follow < 1 or self.anchor_weight < 0 or self.entropy_weight < 0:
            raise ConfigError("vnl needs weights of at least 0 and follow of at least 0 and below 1")


@register(
    "vnl",
    VnlSettings(),
    Traits(
        paper="vicinal, after Ambekar et al. 2024",
        updates="all parameters, if left-out domains say so",
        training="phi and the rule on left-out domains",
        passes="3 forward, 1 backward",
    ),
)
class Vnl(Adapter):
    """Anchored out-of-fold neighbor labels on stream statistics: the default.

    Loss: entropy_weight H(p) + anchor_weight CE(y_anchor, p), y_anchor the neighbor labels of a frozen source
    model; after a step theta <- theta + pull (theta_s - theta). Whether it updates at all, the step size, and
    whether own output or labels predict were chosen on left-out source domains. Prediction after the update.
    """

    steady = True
    predicts = ("own", "labels")
    settings: VnlSettings

    def prepare(self, source: Trained) -> None:
        """Set up the anchor, the labelers of anchor and model, and the optimizer."""
        head = self.model.linear
        if self.settings.predict == "labels":
            self.labeler = StreamLabeler(fitted(source.predict_phi), head)
        if self.settings.update == "anchored":
            self.anchor = copy.deepcopy(self.model).eval().requires_grad_(False)
            self.anchor_norm = NormStatistics(self.anchor, self.settings.statistics)
            self.anchor_labeler = StreamLabeler(fitted(source.anchor_phi), head)
        if self.settings.update != "none":
            self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Update toward the anchor's labels and a lower entropy, then predict by labels."""
        if self.settings.update != "none":
            self._learn(x)
        z, logits = predict(self, x)
        if self.settings.predict == "own":
            return logits
        draws = self.settings.num_samples
        y_hat: Tensor = self.labeler(z, logits, self.model.linear, draws, self.generator)
        self.draws = self.labeler.draws
        return as_logits(y_hat)

    def _learn(self, x: Tensor) -> None:
        y_anchor = self._anchor_labels(x) if self.settings.update == "anchored" else None

        def loss(z: Tensor, logits: Tensor) -> Tensor:
            value = self.settings.entropy_weight * prediction_entropy(logits)
            if y_anchor is not None:
                value = value + self.settings.anchor_weight * soft_cross_entropy(logits, y_anchor)
            return value

        for _ in range(self.settings.steps):
            update(self, x, loss)
        if y_anchor is not None and self.settings.follow > 0:
            self._move_anchor()

    @torch.no_grad()
    def _anchor_labels(self, x: Tensor) -> Tensor:
        """Return y_hat by the frozen source model, on statistics and with a memory of its own."""
        self.anchor_norm.begin()
        with self.anchor_norm.predicting(len(x)):
            z, logits = self.anchor.features_and_logits(x)
        draws = self.settings.num_samples
        y_hat: Tensor = self.anchor_labeler(z, logits, self.anchor.linear, draws, self.generator)
        self.draws = self.anchor_labeler.draws
        return y_hat

    @torch.no_grad()
    def _move_anchor(self) -> None:
        targets = self.model.parameters()
        torch._foreach_lerp_(list(self.anchor.parameters()), list(targets), self.settings.follow)


def fitted(phi: StreamInferenceNet | None) -> StreamInferenceNet:
    """Return a phi that is there, or say how to get one."""
    if phi is None:
        raise AdapterError("this model has no out-of-fold phi: train it again without --no-out-of-fold")
    return phi
