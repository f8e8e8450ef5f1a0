"""RoTTA: a class-balanced memory of recent, certain images, and statistics that change slowly."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from vicinal.adapters.contract import Adapter
from vicinal.adapters.layers import mixed_norm
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import optimizer_for, take_step
from vicinal.adapters.settings import Parameters, Predict, Settings
from vicinal.adapters.statistics import NormStatistics, StatisticsConfig
from vicinal.adapters.teacher import STRONG_VIEW, Follower, report
from vicinal.checkpoint import Trained
from vicinal.data.augment import Augment
from vicinal.data.augmix import AugMix
from vicinal.errors import ConfigError
from vicinal.functional.peers_consistency import timeliness
from vicinal.models.classifier import Classifier
from vicinal.models.wrap import Wrapped

TINY = 1e-6  # inside the logarithm of the entropy, as in the authors' code


@dataclass(frozen=True)
class RottaSettings(Settings):
    """What `rotta` can be told besides what every method can; values as the authors' configuration."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("stream"))
    predict: Predict = "before"
    lr: float = 1e-3
    parameters: Parameters = "norm"
    augment: Augment | AugMix | None = STRONG_VIEW  # the model's view of the memory
    capacity: int = 64  # images in memory
    update_every: int = 64  # images between updates
    teacher_rate: float = 0.001  # nu: how far the teacher follows at each update
    norm_rate: float | None = 0.05  # alpha of robust normalization; None: the package's own stream average
    age_weight: float = 1.0  # lambda_t
    uncertainty_weight: float = 1.0  # lambda_u

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity < 1 or self.update_every < 1:
            raise ConfigError("rotta needs capacity and update_every of at least 1")
        for name in ("teacher_rate", "norm_rate"):
            if not 0 <= (getattr(self, name) or 0) <= 1:
                raise ConfigError(f"{name} must be between 0 and 1, not {getattr(self, name)}")


class Slot(NamedTuple):
    """One remembered image: its row among memory and batch, its label, how unsure it was, when it came."""

    row: int
    label: int
    uncertainty: float
    born: int


@register(
    "rotta",
    RottaSettings(),
    Traits(
        paper="Yuan, Xie, Li 2023",
        updates="normalization scale and shift",
        batch_of_one="as any other: updates come from the memory",
        norms="any with scale and shift; parameters='all' without",
        passes="1 forward; every 64 images 2 forward, 1 backward of the memory",
    ),
)
class Rotta(Adapter):
    """Teacher and student on a class-balanced memory; statistics follow the stream slowly.

    Yuan, Xie, Li: Robust Test-Time Adaptation in Dynamic Scenarios, 2023. Every 64 images
    loss = (1/M) sum_i E(age_i) CE(teacher(x_i), student(a(x_i))), E(age) = 1 / (1 + e^age), over a memory of
    M <= 64 images, a strong augmentation. Ages count images, in units of the memory's size. An image of
    label c enters if there is room in its class (64 / C), else in place of the worst of its class, or of the
    largest classes when the memory is full, by the score lambda_t / (1 + e^-age) + lambda_u H / log C, and
    only if it is better itself. After each update the teacher follows at 0.001.

    Updated: scale and shift of normalization, by Adam 1e-3.
    Prediction: the teacher's from before the update; predict="own": from after it.
    Statistics: on stream statistics, the default, normalization is the paper's robust one: in updates both
    models run on 0.95 running + 0.05 memory moments and keep them; predictions run on what the teacher kept.
    With norm_rate=None they run on the package's own stream average.
    Defaults: the authors' configuration (batches of 64), every one of them.

    Departs: the augmentation lacks gamma, rotation, blur and noise and is drawn for each image, in the code
    once for the memory. The code knows BatchNorm alone; here GroupNorm and LayerNorm are updated as well.
    Several steps repeat the update; the code's would remember the batch again.
    """

    predicts = ("own", "before")
    settings: RottaSettings

    def prepare(self, source: Trained) -> None:
        """Set up the teacher and the optimizer; the memory is empty."""
        self.teacher = Follower(self.model, self.settings.statistics, self.norm)
        self.optimizer = optimizer_for(self)

    @property
    def predictor(self) -> tuple[Classifier | Wrapped, NormStatistics]:
        """The teacher and its statistics."""
        return self.teacher.model, self.teacher.norm

    def adapt(self, x: Tensor) -> Tensor:
        """Predict by the teacher, remember the batch, update whenever enough images have come."""
        if not self._robust:
            self.teacher.settle(x)
            self.norm.settle(self.model, x)
        z, logits = self.teacher(x) if not self._robust else self._kept(x)
        self._remember_and_learn(x, logits)
        self.teacher.carry(x)
        if self.settings.predict == "own":
            z, logits = self.teacher(x) if not self._robust else self._kept(x)
        return report(self, self.teacher, z, logits)

    @property
    def _robust(self) -> bool:
        return self.settings.statistics.kind == "stream" and self.settings.norm_rate is not None

    @torch.no_grad()
    def _kept(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.teacher.model.features_and_logits(x)

    def _remember_and_learn(self, x: Tensor, logits: Tensor) -> None:
        p = logits.softmax(-1)
        entropy = -(p * (p + TINY).log()).sum(-1)
        # Every place in memory depends on the one before: the bookkeeping is done on the host, read once.
        told = list(zip(p.argmax(-1).tolist(), entropy.tolist(), strict=True))
        images = torch.cat([self.memory["images"], x]) if "images" in self.memory else x
        slots, seen = self._slots(), self._seen()
        first = len(images) - len(x)
        for row, (label, uncertainty) in enumerate(told, start=first):
            slots = remembered(slots, Slot(row, label, uncertainty, seen), self.settings, logits.shape[1])
            seen += 1
            if seen % self.settings.update_every == 0 and slots:
                for _ in range(self.settings.steps):
                    self._learn(images, slots, seen)
        self._store(images, slots, seen, logits)

    def _learn(self, images: Tensor, slots: list[Slot], seen: int) -> None:
        assert self.optimizer is not None
        x = images[torch.tensor([slot.row for slot in slots], device=images.device)]
        ages = torch.tensor([seen - slot.born for slot in slots], dtype=x.dtype, device=x.device)
        with torch.no_grad(), self._updating(self.teacher.model, self.teacher.norm, len(x)):
            y = self.teacher.model(x).softmax(-1)
        augment = self.settings.augment
        view = x if augment is None else augment(x, self.generator)
        with self._updating(self.model, self.norm, len(x)):
            logits = self.model(view)
        unlike = -(y * log_softmax(logits, dim=-1)).sum(-1)
        self.optimizer.zero_grad(set_to_none=True)
        (unlike * timeliness(ages / self.settings.capacity)).mean().backward()
        take_step(self)
        self.teacher.follow(self.model, self.settings.teacher_rate)

    def _updating(
        self, model: Classifier | Wrapped, norm: NormStatistics, images: int
    ) -> AbstractContextManager[None]:
        rate = self.settings.norm_rate
        if self._robust and rate is not None:
            return mixed_norm(model, rate, keep=True)
        return norm.updating(images, views=0)

    def _seen(self) -> int:
        return int(self.memory["seen"]) if "seen" in self.memory else 0

    def _slots(self) -> list[Slot]:
        if "labels" not in self.memory:
            return []
        columns = [self.memory[name].tolist() for name in ("labels", "uncertainty", "born")]
        return [Slot(row, *values) for row, values in enumerate(zip(*columns, strict=True))]

    def _store(self, images: Tensor, slots: list[Slot], seen: int, like: Tensor) -> None:
        device = images.device
        rows, labels, uncertainty, born = ([slot[part] for slot in slots] for part in range(4))
        self.memory = {
            "images": images[torch.tensor(rows, dtype=torch.long, device=device)],
            "labels": torch.tensor(labels, dtype=torch.long, device=device),
            "uncertainty": torch.tensor(uncertainty, dtype=like.dtype, device=device),
            "born": torch.tensor(born, dtype=torch.long, device=device),
            "seen": torch.tensor(seen, device=device),
        }


def remembered(slots: list[Slot], new: Slot, settings: RottaSettings, classes: int) -> list[Slot]:
    """Return the memory after an image has come, class by class, oldest first: with it, or as it was."""
    counts = [0] * classes
    for slot in slots:
        counts[slot.label] += 1
    if counts[new.label] < settings.capacity / classes:
        if len(slots) < settings.capacity:
            return _with(slots, new)
        crowded = {label for label, count in enumerate(counts) if count == max(counts)}
    else:
        crowded = {new.label}

    def score(slot: Slot) -> float:
        age = (new.born - slot.born) / settings.capacity
        unsure = slot.uncertainty / math.log(max(classes, 2))
        return settings.age_weight / (1 + math.exp(-age)) + settings.uncertainty_weight * unsure

    # Of equals the last one goes.
    scored = [(score(slot), place) for place, slot in enumerate(slots) if slot.label in crowded]
    if not scored:
        return _with(slots, new)
    worst, place = max(scored)
    return _with(slots[:place] + slots[place + 1 :], new) if worst > score(new) else slots


def _with(slots: list[Slot], new: Slot) -> list[Slot]:
    return sorted([*slots, new], key=lambda slot: slot.label)
