"""A guard against collapse: it watches an adapter without labels, rolls it back and slows it down.

Updates by a model's own predictions can run away: all images become one class, or noise and one-sided batches
leave weights, statistics and memories unfit for what comes next. The source model cannot run away, so it is
asked now and then what it says of the same images (`Reference`). Two signs tell a sick adapter from one that
corrects its source:

- it contradicts what the source is sure of. agreement = sum_i w_i [same class] / sum_i w_i,
  w_i = (confidence of the source)^power;
- it is less certain than the source: methods make themselves more certain, so a lower certainty means
  statistics or memories that do not fit.

A batch of one class is one-sided for the source too, so a class-sorted stream gives no alarm by itself. Where
the two differ, the source is asked again on the batch's own statistics and the more certain of its opinions
counts: under a strong shift that statistics mend, this is the second. Logits or weights that are not finite,
and updates that are out of proportion, give an alarm at once.

An alarm: the source's opinion is the prediction; the adapter goes back to its last healthy snapshot, further
back with every alarm that follows, at last to the source; its step size is halved; and it is asked about at
every batch until it has been healthy for a while. After `patience` such alarms it rests, for longer each time,
and the source predicts.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vicinal.adapters.contract import Adapter, Settings
from vicinal.adapters.prediction import Prediction, predict
from vicinal.adapters.reference import Opinion, Reference
from vicinal.adapters.snapshots import Snapshot, drift, restore, scale_step, take
from vicinal.errors import ConfigError
from vicinal.functional.trust import Comparison, compared, mean_entropy, together, top_share


@dataclass(frozen=True)
class GuardConfig:
    """When the guard looks, what alarms it and what it does then.

    The three limits were chosen on source domains alone: rotated digits, models trained on 30, 45 and 60
    degrees, streams of 15 and 75 degrees, three seeds. Over 1260 batches of healthy streams (bn, soft, hard on
    batch and stream statistics, steps of 1e-4 and 1e-3) agreement was never below 0.76 and excess entropy
    never above 0.13; on class-sorted streams with batch statistics their medians were 0.46 and 0.33.
    """

    agreement: float = 0.85  # least agreement with the source, weighted by its confidence, at any look
    usual_agreement: float = 0.92  # the same, mean over the last looks; below it, every batch is looked at
    looks: int = 4  # that the mean is over
    second_opinion: float = 0.95  # below this agreement the source is asked on the batch's statistics too
    margin: float = 0.05  # mean entropies of the two opinions this close, in units of log C, count as equal
    excess_entropy: float = 0.15  # most that the mean entropy may exceed the source's, in units of log C
    update: float = 0.25  # most that a batch may move the weights, relative to their length
    power: float = 4.0  # of the source's confidence in the weights of the agreement
    evidence: int = 16  # images that a judgement needs: small batches are judged together
    first_interval: int = 2  # batches until the second look; doubled after every healthy one
    interval: int = 32  # batches between two looks at most
    # A mean entropy this far above what it was at the last looks, or an entropy of the mean prediction, its
    # diversity, this far below, in units of log C, calls for a look.
    change: float = 0.1
    share: float = 0.5  # a class with more of the batch than this (plus its fair half) calls for a look
    used_to: int = 8  # healthy looks at one-sided batches, after which one more of them goes unlooked at
    snapshots: int = 3  # states that are kept, besides the source
    spacing: int = 8  # batches between two snapshots at least
    patience: int = 3  # alarms until the adapter rests
    recover: int = 4  # healthy looks in a row that end the watch
    rest: int = 8  # batches of the first rest; each further one is twice as long
    longest_rest: int = 64
    smallest_step: float = 0.125  # the step size is never scaled below this
    calm: int = 32  # batches without an alarm after which the step size is doubled again, up to its own
    events: int = 1000  # the newest that are kept

    def __post_init__(self) -> None:
        counts = (self.evidence, self.first_interval, self.used_to, self.patience, self.recover, self.rest)
        if min(*counts, self.spacing, self.calm, self.events) < 1 or self.snapshots < 0:
            raise ConfigError("a guard counts batches and images from 1 on, and keeps 0 snapshots or more")
        if self.interval < self.first_interval or self.longest_rest < self.rest:
            raise ConfigError("a guard's longest interval and rest cannot be shorter than its first")
        if not 0 <= self.agreement <= 1 or not 0 < self.smallest_step <= 1:
            raise ConfigError("a guard's agreement lies in [0, 1] and its smallest_step in (0, 1]")


class Event(NamedTuple):
    """One thing the guard did, and why."""

    step: int  # batches before this one
    signal: str  # agreement, excess_entropy, update, finite
    value: float
    threshold: float
    action: str


@dataclass
class Watch:
    """What the guard remembers of the stream, in plain values."""

    step: int = 0
    wait: int = 0  # batches until the next look
    interval: int = 1  # the wait after that
    watching: int = 0  # healthy looks still needed after an alarm
    strikes: int = 0
    resting: int = 0
    rest: int = 0
    scale: float = 1.0  # of the step size
    entropy: float | None = None  # mean entropy of predictions, averaged over looks
    diversity: float | None = None  # entropy of the mean prediction, likewise
    one_sided: int = 0  # healthy looks at one-sided batches
    passed_over: int = 0  # one-sided batches since the last look
    drift: float = 0.0
    looked: int = 0  # step of the last look
    snapped: int = 0
    alarmed: int = 0
    evidence: list[tuple[float, ...]] = field(default_factory=list)


class Guarded(nn.Module):
    """An adapter under guard: called, reset, saved and restored as the adapter itself."""

    def __init__(self, adapter: Adapter, config: GuardConfig | None = None) -> None:
        super().__init__()
        self.adapter = adapter
        self.config = config or GuardConfig()
        self.reference = Reference(adapter, self.config.margin)
        self.events: list[Event] = []
        self.snapshots: list[Snapshot] = []
        self.by_source = False  # whether the source made the last prediction
        self.watch = self._fresh()

    @property
    def model(self) -> nn.Module:
        """The adapted model."""
        return self.adapter.model

    @property
    def settings(self) -> Settings:
        """The adapter's settings."""
        return self.adapter.settings

    @property
    def steps_taken(self) -> int:
        """How many batches have come."""
        return self.watch.step

    @property
    def draws(self) -> Tensor | None:
        """The adapter's draws, where it made the last prediction."""
        return None if self.by_source else self.adapter.draws

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, C): the adapter's where it is healthy, else the source's."""
        if self.watch.resting:
            logits: Tensor = self._rest(self.adapter.checked(x))
        else:
            logits = self.adapter(x)
            opinion = self._judge(x.to(next(self.adapter.model.parameters()).dtype), logits)
            self.by_source = opinion is not None
            logits = logits if opinion is None else opinion.logits
        self.watch.step += 1
        return logits.to(self.adapter.output_dtype)

    def predict(self, x: Tensor) -> Prediction:
        """Return label, probability, entropy and spread of each image."""
        return predict(self, x)

    def save(self, path: str | Path) -> None:
        """Write adapter and guard to one file; `load_adapter` goes on from it."""
        from vicinal.adapters.persist import save_adapter

        save_adapter(path, self)

    def export(self, x: Tensor | None = None) -> nn.Module:
        """Return the adapted model alone, frozen."""
        return self.adapter.export(x)

    def reset(self) -> None:
        """Go back to the source model, bit for bit, and forget the stream and every alarm."""
        self.adapter.reset()
        self.events, self.snapshots, self.by_source = [], [], False
        self.watch = self._fresh()

    def report(self) -> str:
        """Return one line for each thing the guard did, or one that says that nothing was amiss."""
        if not self.events:
            return f"guard: no alarm in {self.watch.step} batches"
        return "\n".join(
            f"batch {event.step + 1}: {event.signal} {event.value:.3g} (limit {event.threshold:.3g}): {event.action}"
            for event in self.events
        )

    def get_extra_state(self) -> dict[str, Any]:
        """Return what the guard remembers, snapshots included."""
        return {
            "watch": asdict(self.watch),
            "events": [tuple(event) for event in self.events],
            "snapshots": [tuple(snapshot) for snapshot in self.snapshots],
            "by_source": self.by_source,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_extra_state` returned."""
        self.watch = Watch(**state["watch"])
        self.watch.evidence = [tuple(item) for item in self.watch.evidence]
        self.events = [Event(*event) for event in state["events"]]
        self.snapshots = [Snapshot(*snapshot) for snapshot in state["snapshots"]]
        self.by_source = state["by_source"]

    def _fresh(self) -> Watch:
        # A method without an optimizer is done in one pass or two: looking as often would show in its cost.
        interval = self.config.first_interval * (1 if self.adapter.optimizer is not None else 4)
        return Watch(interval=min(interval, self.config.interval), rest=self.config.rest)

    @torch.no_grad()
    def _judge(self, x: Tensor, logits: Tensor) -> Opinion | None:
        """Return the source's opinion if it must stand in for the adapter's logits, else None."""
        p = logits.float().softmax(-1)
        seen = [
            logits.isfinite().all().to(p),
            mean_entropy(p),
            mean_entropy(p.mean(0, keepdim=True)),
            top_share(p),
        ]
        finite, *signs = torch.stack(seen).tolist()  # the only wait for the device while all is well
        if not finite:
            return self._alarm("finite", 0.0, 1.0, self.reference.consensus(x))
        if not self._due(*signs, p.shape):
            return None
        return self._look(x, p)

    def _due(self, entropy: float, diversity: float, share: float, shape: torch.Size) -> bool:
        """Say whether to ask the source about this batch: it is time, or the batch is out of the ordinary."""
        watch, config = self.watch, self.config
        images, classes = shape
        # The most common class of a handful of images always has a large share.
        one_sided = images >= config.used_to and share > config.share + (1 - config.share) / classes
        watch.passed_over += one_sided
        allowed = min(watch.one_sided // config.used_to, config.interval - 1)
        due = watch.wait <= 0 or watch.passed_over > allowed or self._changed(entropy, diversity)
        watch.wait -= 1
        if due:
            watch.one_sided = watch.one_sided + 1 if one_sided else 0
            watch.passed_over = 0
            watch.entropy = entropy if watch.entropy is None else (watch.entropy + entropy) / 2
            watch.diversity = diversity if watch.diversity is None else (watch.diversity + diversity) / 2
        return due

    def _changed(self, entropy: float, diversity: float) -> bool:
        watch = self.watch
        if watch.entropy is None or watch.diversity is None:
            return True
        change = max(entropy - watch.entropy, watch.diversity - diversity)
        return change > self.config.change

    def _look(self, x: Tensor, p: Tensor) -> Opinion | None:
        """Ask the source about a batch and act on what comes out."""
        opinion = self.reference.on_source(x)
        found = compared(p, opinion.p.float(), self.config.power)
        if found.agreement < self.config.second_opinion or found.excess_entropy > self.config.excess_entropy:
            opinion = self.reference.consensus(x, opinion)
            found = compared(p, opinion.p.float(), self.config.power)
        looks = self._remembered(found)
        sign = self._sign_of_illness(looks) or self._sign_of_excess()
        self.watch.looked = self.watch.step
        if sign is not None:
            return self._alarm(*sign, opinion)
        if looks[-1].images < self.config.evidence or looks[-1].agreement < self.config.usual_agreement:
            self.watch.wait = 0
            return opinion if self.watch.watching else None
        return self._healthy()

    def _remembered(self, found: Comparison) -> list[Comparison]:
        """Return the last looks, this one included; those at too few images are taken together."""
        looks = [Comparison(*look) for look in self.watch.evidence]  # type: ignore[arg-type]
        if looks and looks[-1].images < self.config.evidence:
            found = together([looks.pop(), found])
        looks = [*looks, found][-self.config.looks :]
        self.watch.evidence = [tuple(look) for look in looks]
        return looks

    def _sign_of_illness(self, looks: list[Comparison]) -> tuple[str, float, float] | None:
        """Return signal, value and limit if the adapter contradicts the source or is less certain."""
        config, newest = self.config, looks[-1]
        if newest.images < config.evidence:
            return None
        if newest.agreement < config.agreement:
            return "agreement", newest.agreement, config.agreement
        if newest.excess_entropy > config.excess_entropy:
            return "excess_entropy", newest.excess_entropy, config.excess_entropy
        usual = sum(look.agreement for look in looks) / len(looks)
        if len(looks) == config.looks and usual < config.usual_agreement:
            return "usual_agreement", usual, config.usual_agreement
        return None

    def _sign_of_excess(self) -> tuple[str, float, float] | None:
        """Return signal, value and limit if the weights moved too far since the last look, or are no numbers."""
        moved = drift(self.adapter, self.reference.parameters())
        update = abs(moved - self.watch.drift) / max(self.watch.step - self.watch.looked, 1)
        self.watch.drift = moved
        if update <= self.config.update:
            return None
        return "update", update, self.config.update

    def _healthy(self) -> None:
        """Look less often, keep a snapshot, and give back the step size after a calm time."""
        watch, config = self.watch, self.config
        if watch.watching:
            watch.watching -= 1
            watch.wait = 0
            if watch.watching == 0:
                fresh = self._fresh()
                watch.strikes, watch.rest, watch.interval = 0, fresh.rest, fresh.interval
            return
        watch.wait = watch.interval - 1
        watch.interval = min(2 * watch.interval, config.interval)
        if config.snapshots and watch.step - watch.snapped >= config.spacing:
            self.snapshots = self.snapshots[-(config.snapshots - 1) :] if config.snapshots > 1 else []
            self.snapshots.append(take(self.adapter, watch.step, watch.scale))
            watch.snapped = watch.step
        if watch.scale < 1 and watch.step - watch.alarmed >= config.calm:
            self._scale(min(2 * watch.scale, 1.0))
            watch.alarmed = watch.step

    def _alarm(self, signal: str, value: float, limit: float, opinion: Opinion) -> Opinion:
        """Roll back, slow down, rest if it goes on, note it, and let the source predict."""
        watch, config = self.watch, self.config
        watch.strikes += 1
        if watch.strikes > 1 and self.snapshots:
            self.snapshots.pop()  # it has been gone back to and did not help
        action = self._roll_back()
        self._scale(max(watch.scale / 2, config.smallest_step))
        if self.adapter.optimizer is not None:
            action += f", step size x {watch.scale:g}"
        watch.evidence, watch.wait, watch.watching = [], 0, config.recover
        watch.snapped = watch.alarmed = watch.step
        if watch.strikes >= config.patience:
            watch.resting = watch.rest
            watch.rest = min(2 * watch.rest, config.longest_rest)
            action += f", the source predicts the next {watch.resting} batches"
        self.events = [*self.events, Event(watch.step, signal, value, limit, action)][-config.events :]
        return opinion

    def _roll_back(self) -> str:
        """Restore the newest snapshot, or the source, and return what was done."""
        if self.snapshots:
            snapshot = self.snapshots[-1]
            restore(self.adapter, snapshot)
            scale_step(self.adapter, self.watch.scale / snapshot.scale)
            back = f"rolled back to batch {snapshot.step + 1}"
        else:
            self.adapter.reset()
            scale_step(self.adapter, self.watch.scale)
            back = "rolled back to the source"
        self.watch.drift = drift(self.adapter, self.reference.parameters())
        return back

    def _scale(self, scale: float) -> None:
        scale_step(self.adapter, scale / self.watch.scale)
        self.watch.scale = scale

    def _rest(self, x: Tensor) -> Tensor:
        """Return the source's logits while the adapter rests; it is tried again, under watch, after that."""
        self.watch.resting -= 1
        self.by_source = True
        return self.reference.consensus(x).logits
