"""A guard against collapse: it watches an adapter without labels, rolls it back and slows it down.

Updates by a model's own predictions can run away: all images become one class, or noise and one-sided batches
leave weights, statistics and memories unfit for what comes next. The source model cannot run away, so it is
asked now and then what it says of the same images (`Reference`). Signs of a sick adapter:

- it contradicts what the source is sure of. agreement = sum_i w_i [same class] / sum_i w_i,
  w_i = (confidence of the source)^power;
- its mean prediction is less diverse than the source's: all images become one class;
- it is less certain than the source: methods make themselves more certain, so a lower certainty means
  statistics or memories that do not fit. Logits on a scale of their own are not held to this.

How much of this is too much depends on the batch. Where one class has most of it, to the adapter or to the
source, the adapter is held to the source closely: that is where methods fail, and a batch of one class is
one-sided for the source too, so that a class-sorted stream gives no alarm by itself. On batches of many
classes it may correct the source by far more; where it does, several batches are judged together. Where the
two differ the source is asked again, on the batch's own statistics: under a shift that statistics mend it
is this opinion that counts, else the more certain of the two, or their mean. Logits or weights that are not
finite, and updates out of all proportion, give an alarm at once.

An alarm: the source's opinion is the prediction, and every batch is looked at until all has been well for a
while. With a second alarm in that time the adapter goes back to its last healthy snapshot, further back with
every alarm that follows, at last to the source, its step size is halved, and the source predicts until it has
been healthy for a while. After `patience` alarms it rests, for longer each time, and the source predicts.
"""

from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.adapters.contract import Adapter, as_it_is
from vicinal.adapters.prediction import Prediction, predict
from vicinal.adapters.reference import Opinion, Reference
from vicinal.adapters.settings import Settings
from vicinal.adapters.snapshots import Snapshot, drift, restore, scale_step, take
from vicinal.adapters.turns import in_turn
from vicinal.adapters.watch import Event, GuardConfig, Illness, Signs, Watch, illness
from vicinal.errors import AdapterError
from vicinal.functional.trust import Comparison, compared, information, mean_entropy, top_share

__all__ = ["Event", "GuardConfig", "Guarded"]


class Guarded(nn.Module):
    """An adapter under guard: called, reset, saved and restored as the adapter itself, one call at a time."""

    def __init__(self, adapter: Adapter, config: GuardConfig | None = None) -> None:
        super().__init__()
        if not isinstance(adapter, Adapter):
            raise AdapterError(
                f"a guard watches an adapter, as in Guarded(adapt(model)), not {type(adapter).__name__}"
            )
        self.adapter = adapter
        self.config = config or GuardConfig()
        limits = self.config
        self.reference = Reference(adapter, limits.margin, limits.shift, limits.told, limits.more)
        self.events: list[Event] = []
        self.snapshots: list[Snapshot] = []
        self.by_source = False  # whether the source made the last prediction
        self.watch = self._fresh()

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The adapter's: a call of either waits for those of both."""
        return self.adapter.lock

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

    @in_turn
    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, C): the adapter's where it is healthy, else the source's."""
        with as_it_is(self.model):
            return self._answered(x).to(self.adapter.output_dtype)

    def _answered(self, x: Tensor) -> Tensor:
        """Return the logits of the adapter or of the source, both divided by what they are to be."""
        logits: Tensor | None = None
        if self.watch.resting:
            opinion: Opinion | None = self._rest(self.adapter.checked(x))
        else:
            logits = self.adapter(x)
            own = logits * self.adapter.divided_by  # as sure as the source is
            opinion = self._judge(x.to(next(self.adapter.model.parameters()).dtype), own)
        self.by_source = opinion is not None
        self.watch.stood_in += self.by_source
        self.watch.step += 1
        if opinion is not None:
            # Not by all of `divided_by`: how often the two agree says nothing of the source itself.
            return opinion.logits / self.settings.output_temperature
        assert logits is not None
        return logits

    @in_turn
    def predict(self, x: Tensor) -> Prediction:
        """Return label, probability, entropy and spread of each image."""
        return predict(self, x)

    @in_turn
    def save(self, path: str | Path) -> None:
        """Write adapter and guard to one file; `load_adapter` goes on from it."""
        from vicinal.adapters.persist import save_adapter

        save_adapter(path, self)

    @in_turn
    def export(self, x: Tensor | None = None) -> nn.Module:
        """Return the adapted model alone, frozen."""
        return self.adapter.export(x)

    @in_turn
    def reset(self) -> None:
        """Go back to the source model, bit for bit, and forget the stream and every alarm."""
        self.adapter.reset()
        self.events, self.snapshots, self.by_source = [], [], False
        self.watch = self._fresh()

    @in_turn
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of adapter and guard, as it is between two batches."""
        return super().state_dict(*args, **kwargs)

    @in_turn
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Continue the stream that left this state behind."""
        return super().load_state_dict(*args, **kwargs)

    @in_turn
    def report(self) -> str:
        """Return a line for each alarm, or that there was none, and how often the source stood in."""
        lines = [str(event) for event in self.events] or [f"no alarm in {self.watch.step} batches"]
        stood_in, batches = self.watch.stood_in, self.watch.step
        if stood_in:
            fails = (
                "; where it is the one that fails, the adapter may do better without a guard"
                if 2 * stood_in > batches
                else ""
            )
            lines.append(f"the source predicted {stood_in} of {batches} batches{fails}")
        return "\n".join(f"guard: {line}" for line in lines)

    @in_turn
    def get_extra_state(self) -> dict[str, Any]:
        """Return what the guard remembers, snapshots included."""
        return {
            "watch": asdict(self.watch),
            "events": [tuple(event) for event in self.events],
            "snapshots": [tuple(snapshot) for snapshot in self.snapshots],
            "by_source": self.by_source,
        }

    @in_turn
    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_extra_state` returned."""
        self.watch = Watch(**state["watch"])
        self.events = [Event(*event) for event in state["events"]]
        self.snapshots = [Snapshot(*snapshot) for snapshot in state["snapshots"]]
        self.by_source = state["by_source"]

    @property
    def _slower(self) -> int:
        # What is done in one pass or two would show in its cost if it were looked at as often.
        return self.config.forward_only if self.adapter.optimizer is None else 1

    def _fresh(self) -> Watch:
        return Watch(interval=self.config.first_interval * self._slower, rest=self.config.rest)

    @torch.no_grad()
    def _judge(self, x: Tensor, logits: Tensor) -> Opinion | None:
        """Return the source's opinion if it must stand in for the adapter's logits, else None."""
        p = logits.float().softmax(-1)
        of_mean = mean_entropy(p.mean(0, keepdim=True))
        seen = torch.stack([logits.isfinite().all().to(p), mean_entropy(p), of_mean, top_share(p)])
        finite, entropy, diversity, share = seen.tolist()  # the only wait for the device while all is well
        if not finite:
            return self._alarm(Illness("finite", 0.0, 1.0, grave=True), self.reference.consensus(x))
        signs = Signs(entropy, diversity, share, images=len(p), classes=p.shape[1])
        return self._look(x, p) if self.watch.due(signs, self.config) else None

    def _look(self, x: Tensor, p: Tensor) -> Opinion | None:
        """Ask the source about a batch and act on what comes out."""
        config, watch = self.config, self.watch
        opinion = self.reference.on_source(x)
        found = compared(p, opinion.p.float(), config.power)
        differs = (
            found.agreement < config.second_opinion or found.excess_entropy > config.one_sided.excess_entropy
        )
        if differs or self._source_fails(p, opinion):
            opinion = self.reference.consensus(x, opinion)
            found = compared(p, opinion.p.float(), config.power)
        alone, found = found, watch.gather(found)
        ill = illness(found, config, self.adapter.own_scale) or self._excessive_update()
        watch.looked = watch.step
        if ill is not None:
            return self._alarm(ill, opinion)
        doubtful = min(alone.agreement, found.agreement) < config.limits(alone).doubt
        return self._unalarmed(found, opinion, doubtful)

    def _source_fails(self, p: Tensor, opinion: Opinion) -> bool:
        """Say whether the source tells nothing apart, and the adapter is not the source itself."""
        told, farthest = torch.stack([information(opinion.p.float()), (p - opinion.p).abs().amax()]).tolist()
        return bool(told < self.config.told and farthest > self.config.same)

    def _unalarmed(self, found: Comparison, opinion: Opinion, doubtful: bool) -> Opinion | None:
        """Return the source's opinion while there is doubt; else note that all is well."""
        config, watch = self.config, self.watch
        on_probation = watch.watching > 0 and watch.strikes > 1
        unsure = not watch.judged or config.differs(found, self.adapter.own_scale)
        enough = found.images >= (config.pool if unsure else config.evidence)
        watch.evidence = None if enough else tuple(found)
        if not enough or doubtful:
            watch.wait = 0
            return opinion if (doubtful and len(opinion.p) >= config.handful) or on_probation else None
        watch.judged = True
        self._healthy()
        if config.is_one_sided(float(top_share(opinion.p)), *opinion.p.shape):
            watch.wait = min(watch.wait, watch.may_pass_over(config))
        return opinion if on_probation else None

    def _excessive_update(self) -> Illness | None:
        """Return what is wrong if the weights moved too far since the last look, or are not finite."""
        moved = drift(self.adapter, self.reference.parameters())
        update = abs(moved - self.watch.drift) / max(self.watch.step - self.watch.looked, 1)
        self.watch.drift = moved
        return (
            None
            if update <= self.config.update
            else Illness("update", update, self.config.update, grave=True)
        )

    def _healthy(self) -> None:
        """Look less often, keep a snapshot, and give back the step size after a calm time."""
        watch, config = self.watch, self.config
        if watch.watching:
            watch.watching -= 1
            watch.wait = 0
            if watch.watching == 0:
                watch.strikes, watch.rest = 0, config.rest
                watch.interval = config.first_interval * self._slower
            return
        watch.wait = watch.interval - 1
        watch.interval = min(2 * watch.interval, config.interval * self._slower)
        if config.snapshots and watch.step - watch.snapped >= config.spacing:
            self.snapshots.append(take(self.adapter, watch.step, watch.scale))
            self.snapshots = self.snapshots[-config.snapshots :]
            watch.snapped = watch.step
        if watch.scale < 1 and watch.step - watch.alarmed >= config.calm:
            self._scale(min(2 * watch.scale, 1.0))
            watch.alarmed = watch.step

    def _alarm(self, ill: Illness, opinion: Opinion) -> Opinion:
        """Roll back, slow down, rest if it goes on, note it, and let the source predict."""
        watch, config = self.watch, self.config
        watch.strikes += 1
        if watch.strikes > 2 and self.snapshots:
            self.snapshots.pop()  # it has been gone back to and did not help
        action = self._go_back() if watch.strikes > 1 or ill.grave else "a warning"
        watch.evidence, watch.wait, watch.watching, watch.judged = None, 0, config.recover, True
        watch.snapped = watch.alarmed = watch.looked = watch.step
        if watch.strikes >= config.patience:
            watch.resting = watch.rest
            watch.rest = min(2 * watch.rest, config.longest_rest)
            action += f", the source predicts the next {watch.resting} batches"
        self.events = [*self.events, Event(watch.step, ill.signal, ill.value, ill.limit, action)][
            -config.events :
        ]
        return opinion

    def _go_back(self) -> str:
        """Restore the newest snapshot, or the source, halve the step size, and return what was done."""
        seen = self.adapter.seen.clone()
        if self.snapshots:
            snapshot = self.snapshots[-1]
            restore(self.adapter, snapshot)
            scale_step(self.adapter, self.watch.scale / snapshot.scale)
            done = f"rolled back to batch {snapshot.step + 1}"
        else:
            self.adapter.reset()
            scale_step(self.adapter, self.watch.scale)
            done = "rolled back to the source"
        self.adapter.seen.copy_(seen)  # with a horizon, fewer images would mean longer steps
        self.watch.drift = drift(self.adapter, self.reference.parameters())
        if self.adapter.optimizer is not None:
            self._scale(max(self.watch.scale / 2, self.config.smallest_step))
            done += f", step size x {self.watch.scale:g}"
        return done

    def _scale(self, scale: float) -> None:
        scale_step(self.adapter, scale / self.watch.scale)
        self.watch.scale = scale

    def _rest(self, x: Tensor) -> Opinion:
        """Return the source's opinion while the adapter rests; after that it is tried again, under watch."""
        self.watch.resting -= 1
        self.watch.looked = self.watch.step  # the next update is one batch's, however long the rest
        return self.reference.consensus(x)
