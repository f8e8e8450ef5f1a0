"""TTT++: a contrastive head goes on learning while the features' moments are held to the source's."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import optimizer_for, predict, take_step
from vicinal.adapters.settings import Parameters, Settings
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.checkpoint import Trained
from vicinal.data.augment import Augment
from vicinal.data.augmix import AugMix
from vicinal.errors import AdapterError, ConfigError
from vicinal.functional.peers_consistency import (
    FeatureMoments,
    contrastive_loss,
    feature_moments,
    moment_distances,
)
from vicinal.models.auxiliary import filled, part_of, projection_head

# SimCLR's for small images, without its blur.
CONTRAST_VIEW = Augment(0.2, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, gray=0.2)
PARTS = ("features", "projection")


@dataclass(frozen=True)
class TttPlusSettings(Settings):
    """What `ttt_pp` can be told besides what every method can; constants as in the authors' code."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("batch"))
    lr: float = 1e-3
    parameters: Parameters = "features"
    optimizer: Literal["adam", "sgd"] = "sgd"
    momentum: float = 0.9
    augment: Augment | AugMix | None = CONTRAST_VIEW  # makes the two views that are contrasted
    temperature: float = 0.5
    base_temperature: float = 0.07  # the contrastive loss is weighted by temperature / base_temperature
    features_weight: float = 0.05  # of the distance of the features' moments (its script for CIFAR-10)
    projection_weight: float = 0.2  # of the distance of the projections' moments
    mean_factor: float = 0.5  # of the means against the covariances
    queue: int = 256  # features, the newest included, that moments are estimated from

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0 or not self.base_temperature > 0 or self.queue < 1:
            raise ConfigError("ttt_pp needs temperatures above 0 and a queue of at least 1")
        if self.augment is None:
            raise ConfigError("ttt_pp needs an augmentation to make its two views")


@register(
    "ttt_pp",
    TttPlusSettings(),
    Traits(
        paper="Liu, Kothari, van Delft, Bellot-Gurlet, Mordan, Alahi 2021",
        updates="features",
        source_data="mean and covariance of features, stored by training",
        training="--algorithm ttt_pp (a contrastive head trained jointly)",
        batch_of_one="no contrast without others; moments from the queue of earlier images",
        passes="4 forward, 3 backward",
    ),
)
class TttPlus(Adapter):
    """Contrastive learning on the stream, with the moments of the features held to the source's.

    Liu, Kothari, van Delft, Bellot-Gurlet, Mordan, Alahi: TTT++: When Does Self-Supervised Test-Time
    Training Fail or Thrive?, 2021. loss = (t / 0.07) NT-Xent_t(g(f(a x)), g(f(a' x))) + sum over h in
    {f, g f} of w_h [ |S_h - S'_h|^2 / (4 d^2 c_h) + 0.5 |m_h - m'_h|^2 / (d e_h) ], f the features, g the
    contrastive head, m, S moments of the source and m', S' of the clean batch with a queue of earlier ones;
    c_h, e_h are what such distances are between parts of the source and the whole of it. Features are
    updated by SGD with momentum 0.9, heads stay; prediction after the update. Defaults as the authors' code:
    step size 1e-3, temperature 0.5, weights 0.05 and 0.2, a queue of 256. Needs a model trained with the
    algorithm `ttt_pp`.

    Departs from the code, which runs over the target for many epochs: one step a batch as it comes.
    """

    predicts = ("own", "before")
    needs_features = True
    settings: TttPlusSettings

    def prepare(self, source: Trained) -> None:
        """Take the contrastive head and the source's moments over."""
        like = self.model.linear.weight
        stored = told_extras(source)
        weights = part_of(stored, "head")
        sizes = weights["0.weight"].shape[1], len(weights["2.weight"])
        self.projection = filled(lambda: projection_head(*sizes), weights, like).requires_grad_(False)
        for part in PARTS:
            for name in ("mean", "covariance", "distances"):
                # The source's, which no stream changes: not part of a stream's state.
                self.register_buffer(f"{part}_{name}", stored[f"{part}.{name}"].to(like), persistent=False)
        self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Learn from the batch, then predict it."""
        before = None
        for step in range(self.settings.steps):
            if self.settings.predict == "before" and step == self.settings.steps - 1:
                before = predict(self, x)[1]
            self._learn(x, remember=step == self.settings.steps - 1)
        return predict(self, x)[1] if before is None else before

    def _learn(self, x: Tensor, remember: bool) -> None:
        assert self.optimizer is not None
        with self.norm.updating(len(x)):  # the clean view first: it is the one that is observed
            z, _ = self.model.features_and_logits(x)
        loss = self._contrast(x)
        seen = {"features": z, "projection": self.projection(z)}
        for part, weight in zip(PARTS, self._weights(), strict=True):
            loss = loss + weight * self._distance(part, seen[part])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        take_step(self)
        if remember:
            self.memory = {part: self._queued(part, value.detach()) for part, value in seen.items()}

    def _weights(self) -> tuple[float, float]:
        return self.settings.features_weight, self.settings.projection_weight

    def _contrast(self, x: Tensor) -> Tensor:
        settings, augment = self.settings, self.settings.augment
        assert augment is not None
        views = torch.cat([augment(x, self.generator) for _ in range(2)])
        with self.norm.updating(len(x), views=len(views) // len(x)):
            z, _ = self.model.features_and_logits(views)
        first, second = self.projection(z).chunk(2)
        scale = settings.temperature / settings.base_temperature
        return scale * contrastive_loss(first, second, settings.temperature)

    def _distance(self, part: str, value: Tensor) -> Tensor:
        """Return the distance of a part's moments from the source's, in units of the source's own spread."""
        source = FeatureMoments(self.get_buffer(f"{part}_mean"), self.get_buffer(f"{part}_covariance"))
        apart = moment_distances(source, feature_moments(self._queued(part, value)))
        means, covariances = apart / self.get_buffer(f"{part}_distances")
        distance: Tensor = covariances + self.settings.mean_factor * means
        return distance

    def _queued(self, part: str, value: Tensor) -> Tensor:
        """Return the features with those of earlier batches before them, at most as many as the queue."""
        known = self.memory.get(part)
        joined = value if known is None else torch.cat([known, value])
        return joined[-max(self.settings.queue, len(value)) :]


def told_extras(source: Trained) -> dict[str, Tensor]:
    """Return what the algorithm `ttt_pp` left, or say how to get it."""
    stored = part_of(source.extras, "ttt_pp")
    if not stored:
        raise AdapterError(
            "method 'ttt_pp' needs a model trained with --algorithm ttt_pp; "
            f"this one was trained with '{source.algorithm}'"
        )
    return stored
