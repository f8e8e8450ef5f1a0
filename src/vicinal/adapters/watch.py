"""What a guard watches for: its limits, what it remembers of a stream, and what it makes of both."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from vicinal.errors import ConfigError
from vicinal.functional.trust import Comparison, together


@dataclass(frozen=True)
class Limits:
    """How far an adapter may be from the source's opinion."""

    agreement: float  # least agreement with the source, weighted by its confidence
    doubt: float  # below this agreement the source predicts and the next batch is looked at too
    excess_entropy: float  # most that the mean entropy may exceed the source's, in units of log C


@dataclass(frozen=True)
class GuardConfig:
    """When a guard looks, what alarms it and what it does then.

    Images are one-sided where one class has far more than its part, to the adapter or to the source. Collapse
    makes batches one-sided, and so do streams sorted by class, on which most methods fail: there the adapter
    is held to the source closely. On all other batches it may correct the source as far as it can; where it
    does, several of them are judged together, which shows a side more surely.

    All limits were chosen on source domains alone, by what was measured there (docs/experiments.md, 11).
    """

    one_sided: Limits = Limits(agreement=0.9, doubt=0.97, excess_entropy=0.15)
    varied: Limits = Limits(agreement=0.4, doubt=0.5, excess_entropy=0.25)
    pooled: Limits = Limits(agreement=0.4, doubt=0.5, excess_entropy=0.17)  # the same, from `pool` images on
    lost_diversity: float = 0.25  # most that the mean prediction's entropy may be below the source's
    update: float = 0.25  # most that a batch may move the weights from the source or back, by their length
    power: float = 4.0  # of the source's confidence in the weights of the agreement
    second_opinion: float = 0.95  # below this agreement the source is asked on the batch's statistics too
    shift: float = (
        0.25  # of the first layer's statistics, in deviations of the source's, that calls for mending
    )
    told: float = 0.2  # information of predictions, 0 to 1, below which they tell nothing apart
    more: float = 4.0  # times as much as the source tells apart is told apart, even if it is little
    same: float = 1e-4  # probabilities this close to the source's are the source's
    margin: float = 0.05  # mean entropies of the two opinions this close, in units of log C, count as equal
    evidence: int = 16  # images that a judgement needs: smaller batches are judged together
    pool: int = 60  # images that are judged together at first, and where the adapter differs from the source
    first_interval: int = 2  # batches until the second look; doubled after every healthy one
    interval: int = 32  # batches between two looks at most
    forward_only: int = 2  # times longer intervals for methods that take no gradients and cost little
    # A mean entropy this far above what it was at the last looks, or an entropy of the mean prediction, its
    # diversity, this far below, in units of log C, calls for a look.
    change: float = 0.1
    # A class with more of N images than this, its fair part of the rest and chance / sqrt(N) does too.
    share: float = 0.34
    chance: float = 0.7
    used_to: int = 48  # healthy looks at one-sided batches, after which one more of them goes unlooked at
    snapshots: int = 3  # states that are kept, besides the source
    handful: int = 8  # images of which one class always has a large share: never called one-sided
    spacing: int = 4  # batches between two snapshots at least
    patience: int = 4  # alarms until the adapter rests: the first warns, those after it roll back
    recover: int = 4  # healthy looks in a row that end the watch after an alarm
    rest: int = 8  # batches of the first rest; each further one is twice as long
    longest_rest: int = 64
    smallest_step: float = 0.125  # the step size is never scaled below this
    calm: int = 32  # batches without an alarm after which the step size is doubled again, up to its own
    events: int = 1000  # the newest that are kept

    def __post_init__(self) -> None:
        images = (self.evidence, self.pool, self.handful)
        batches = (self.first_interval, self.forward_only, self.used_to, self.spacing, self.rest, self.calm)
        if min(*images, *batches, self.patience, self.recover, self.events) < 1 or self.snapshots < 0:
            raise ConfigError("a guard counts batches and images from 1 on, and keeps 0 snapshots or more")
        if not 0 <= self.share <= 1 or self.chance < 0:
            raise ConfigError("a guard needs a share between 0 and 1 and a chance of at least 0")
        if self.interval < self.first_interval or self.longest_rest < self.rest:
            raise ConfigError("a guard's longest interval and rest cannot be shorter than its first")
        limits = (self.one_sided, self.varied, self.pooled)
        if (
            not all(0 <= each.agreement <= each.doubt <= 1 for each in limits)
            or not 0 < self.smallest_step <= 1
        ):
            raise ConfigError(
                "a guard needs 0 <= agreement <= doubt <= 1 and a smallest_step above 0 and up to 1"
            )

    def is_one_sided(self, share: float, images: int, classes: int) -> bool:
        """Whether one class has far more of the images than its part; a handful cannot tell."""
        limit = self.share + (1 - self.share) / classes + self.chance / math.sqrt(images)
        return images >= self.handful and share > limit

    def limits(self, found: Comparison) -> Limits:
        """Return the limits that a comparison is held to."""
        if self.is_one_sided(found.share, found.images, len(found.votes)):
            return self.one_sided
        return self.varied if found.images < self.pool else self.pooled

    def differs(self, found: Comparison, own_scale: bool) -> bool:
        """Whether an adapter and the source differ so much that one batch of them is not enough to judge."""
        uncertain = not own_scale and found.excess_entropy > self.one_sided.excess_entropy
        return found.agreement < self.one_sided.agreement or uncertain


class Event(NamedTuple):
    """One thing a guard did, and why."""

    step: int  # batches before this one
    signal: str  # agreement, lost_diversity, excess_entropy, update or finite
    value: float
    threshold: float
    action: str

    def __str__(self) -> str:
        reason = f"{self.signal} {self.value:.3g} (limit {self.threshold:.3g})"
        return f"batch {self.step + 1}: {reason}: {self.action}"


class Signs(NamedTuple):
    """What a batch of predictions shows by itself."""

    entropy: float  # mean over images, in units of log C
    diversity: float  # entropy of the mean prediction, likewise
    share: float  # of the most common class
    images: int
    classes: int


class Illness(NamedTuple):
    """A signal beyond its limit."""

    signal: str
    value: float
    limit: float
    grave: bool = False  # beyond doubt


@dataclass
class Watch:
    """What a guard remembers of a stream, in plain values."""

    interval: int  # batches between the next looks
    rest: int  # batches of the next rest
    step: int = 0
    wait: int = 0  # batches until the next look
    watching: int = 0  # healthy looks still needed after an alarm
    strikes: int = 0  # alarms since all was well
    resting: int = 0  # batches that the source still predicts
    scale: float = 1.0  # of the step size
    entropy: float | None = None  # of the predictions, averaged over looks
    diversity: float | None = None
    one_sided: int = 0  # healthy looks at one-sided batches
    passed_over: int = 0  # one-sided batches since the last look
    drift: float = 0.0  # of the weights at the last look
    stood_in: int = 0  # batches that the source predicted
    judged: bool = False  # whether there has been a verdict
    looked: int = 0  # steps of the last look, snapshot and alarm
    snapped: int = 0
    alarmed: int = 0
    evidence: tuple[Any, ...] | None = None  # of looks at too few images to judge by

    def due(self, signs: Signs, config: GuardConfig) -> bool:
        """Say whether to ask the source about this batch: it is time, or the batch is out of the ordinary."""
        one_sided = config.is_one_sided(signs.share, signs.images, signs.classes)
        self.passed_over += one_sided
        due = (
            self.wait <= 0
            or self.passed_over > self.may_pass_over(config)
            or self._changed(signs, config.change)
        )
        self.wait -= 1
        if due:
            self.one_sided = self.one_sided + 1 if one_sided else 0
            self.passed_over = 0
            self.entropy = _average(self.entropy, signs.entropy)
            self.diversity = _average(self.diversity, signs.diversity)
        return due

    def may_pass_over(self, config: GuardConfig) -> int:
        """Return how many one-sided batches may go unlooked at."""
        return min(self.one_sided // config.used_to, config.interval - 1)

    def _changed(self, signs: Signs, change: float) -> bool:
        if self.entropy is None or self.diversity is None:
            return True
        return max(signs.entropy - self.entropy, self.diversity - signs.diversity) > change

    def gather(self, found: Comparison) -> Comparison:
        """Return a comparison together with those that were of too few images to judge by."""
        if self.evidence is not None:
            found = together([Comparison(*self.evidence), found])
        return found


def illness(found: Comparison, config: GuardConfig, own_scale: bool = False) -> Illness | None:
    """Return what is wrong if an adapter contradicts the source, or is less diverse or certain than it.

    The certainty of logits on a scale of their own, cosines for instance, says nothing.
    """
    if found.images < config.evidence:
        return None
    limits = config.limits(found)
    if found.agreement < limits.agreement:
        return Illness("agreement", found.agreement, limits.agreement)
    if found.lost_diversity > config.lost_diversity:
        return Illness("lost_diversity", found.lost_diversity, config.lost_diversity)
    if not own_scale and found.excess_entropy > limits.excess_entropy:
        return Illness("excess_entropy", found.excess_entropy, limits.excess_entropy)
    return None


def _average(usual: float | None, newest: float) -> float:
    return newest if usual is None else (usual + newest) / 2
