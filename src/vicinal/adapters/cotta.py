"""CoTTA: a teacher that follows slowly, labels averaged over views, and weights that come back."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import optimizer_for, take_step
from vicinal.adapters.settings import Predict, Settings
from vicinal.adapters.statistics import NormStatistics, StatisticsConfig
from vicinal.adapters.teacher import STRONG_VIEW, Follower, report
from vicinal.checkpoint import Trained
from vicinal.data.augment import Augment
from vicinal.data.augmix import AugMix
from vicinal.errors import ConfigError
from vicinal.functional.losses import soft_cross_entropy
from vicinal.models.classifier import Classifier
from vicinal.models.wrap import Wrapped


@dataclass(frozen=True)
class CottaSettings(Settings):
    """What `cotta` can be told besides what every method can."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("batch"))
    predict: Predict = "before"
    lr: float = 1e-3  # of the code for CIFAR
    augment: Augment | AugMix | None = STRONG_VIEW  # the teacher's views; None: the clean one alone
    views: int = 32  # views that labels are averaged over, as in the paper and the code
    threshold: float = (
        0.92  # labels are averaged where the source is less sure: 0.92 CIFAR-10, 0.72 CIFAR-100
    )
    teacher_weight: float = 0.999  # of the teacher's own past at every update
    restore: float = 0.01  # chance of each weight to go back to the source's at every update

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.teacher_weight <= 1 or not 0 <= self.restore <= 1 or self.views < 1:
            raise ConfigError(
                "cotta needs teacher_weight and restore between 0 and 1, and views of at least 1"
            )


@register(
    "cotta",
    CottaSettings(),
    Traits(
        paper="Wang, Fink, Van Gool, Dai 2022",
        passes="35 forward, 1 backward (3 forward where the source is sure)",
    ),
)
class Cotta(Adapter):
    """Labels of a slowly following teacher, averaged over views; weights go back to the source at random.

    Wang, Fink, Van Gool, Dai: Continual Test-Time Domain Adaptation, 2022. loss = -(1/N) sum_i sum_c
    q[i, c] log p[i, c], p the model's prediction of the clean batch, q the teacher's: of the clean batch, or
    softmax of its logits averaged over 32 views where the source model's confidence, a mean over the batch,
    is below a threshold. All parameters are updated by Adam; then the teacher follows, theta' = 0.999 theta'
    + 0.001 theta, and each weight goes back to the source's with a chance of 0.01.

    Updated: all parameters, by Adam.
    Prediction: the label, from before the update (predict="own": the teacher's word after it).
    Statistics: the batch's, for all three models.
    Defaults: the authors' code for CIFAR-10: Adam 1e-3, one step, 32 views, threshold 0.92 (CIFAR-100: 0.72),
    teacher 0.999, restore 0.01, batches of 200. For ImageNet it has SGD 0.01, threshold 0.1, restore 0.001
    and the cross-entropy taken both ways and averaged. As in that code, logits are averaged and not
    probabilities, and one draw of a view serves the whole batch.

    Departs: the views lack gamma, rotation, blur and noise. Parameters not called weight or bias, such as the
    tokens of a ViT, are updated and restored as well. On blended and stream statistics the teacher's word on
    the clean batch predicts, not the label: views with other colours do not fit an average over plain images.
    """

    predicts = ("own", "before")
    settings: CottaSettings

    def prepare(self, source: Trained) -> None:
        """Set up the teacher, the source beside it, and the optimizer."""
        self.teacher = Follower(self.model, self.settings.statistics, self.norm)
        self.anchor = Follower(self.model, self.settings.statistics, self.norm)
        self.optimizer = optimizer_for(self)

    @property
    def predictor(self) -> tuple[Classifier | Wrapped, NormStatistics]:
        """The teacher and its statistics."""
        return self.teacher.model, self.teacher.norm

    def adapt(self, x: Tensor) -> Tensor:
        """Update by the teacher's labels and let it follow; return its labels or its later word."""
        for follower in (self.teacher, self.anchor):
            follower.settle(x)
        self.norm.settle(self.model, x)
        told = None
        for step in range(self.settings.steps):
            z, labels = self._labels(x)
            if self.settings.predict == "before" and step == self.settings.steps - 1:
                told = (z, labels) if self.norm.one_pass(2) else self.teacher(x)
            self._learn(x, labels.softmax(-1))
            self.teacher.follow(self.model, 1 - self.settings.teacher_weight)
            self._restore()
        self.teacher.carry(x)
        return report(self, self.teacher, *(told or self.teacher(x)))

    def _labels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the teacher's features of the clean batch, and its logits, averaged over views or not."""
        z, logits = self.teacher.look(x)
        augment = self.settings.augment
        if augment is None or self._sure(x):
            return z, logits
        total = torch.zeros_like(logits)
        for _ in range(self.settings.views):
            total += self.teacher.look(shared_view(augment, x, self.generator))[1]
        return z, total / self.settings.views

    def _sure(self, x: Tensor) -> bool:
        confidence = self.anchor.look(x)[1].softmax(-1).amax(-1).mean()
        # The one look at a value: it decides about 32 passes.
        return bool(confidence >= self.settings.threshold)

    def _learn(self, x: Tensor, y: Tensor) -> None:
        assert self.optimizer is not None
        with self.norm.updating(len(x)):
            logits = self.model(x)
        self.optimizer.zero_grad(set_to_none=True)
        soft_cross_entropy(logits, y).backward()  # type: ignore[no-untyped-call]
        take_step(self)

    @torch.no_grad()
    def _restore(self) -> None:
        pairs = zip(self.model.parameters(), self.anchor.model.parameters(), strict=True)
        moving = [(now, then) for now, then in pairs if now.requires_grad]
        sizes = [now.numel() for now, _ in moving]
        # One draw for all weights: a call for each tensor would cost more than the numbers.
        chance = torch.rand(sum(sizes), generator=self.generator, device=self.generator.device)
        parts = torch.split(chance < self.settings.restore, sizes)
        for (now, then), part in zip(moving, parts, strict=True):
            now.copy_(torch.where(part.view_as(now), then, now))


def shared_view(augment: Augment | AugMix, x: Tensor, generator: torch.Generator) -> Tensor:
    """Return the batch under one draw of the augmentation for all of its images."""
    drawn = augment.draw(1, x.shape[-2], x.shape[-1], generator)
    view: Tensor = augment.apply(x, _repeated(drawn, len(x)))
    return view.to(x.dtype)


def _repeated(drawn: Any, count: int) -> Any:
    """Return draws for one image, a tuple of tensors and of such tuples, as draws for so many."""
    if drawn is None:
        return None
    if isinstance(drawn, Tensor):
        return drawn.expand(count, *drawn.shape[1:])
    return type(drawn)(*(_repeated(part, count) for part in drawn))
