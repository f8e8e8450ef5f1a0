"""Methods whose model stays as it is share its pass over a stream: what they differ in comes after it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from vicinal.adapters.bn import BatchNormOnly
from vicinal.adapters.contract import Adapter
from vicinal.adapters.erm import Erm
from vicinal.adapters.methods import adapt
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.data.streams import Stream
from vicinal.evaluation.online import Outcome, Told, run_online
from vicinal.models.wrap import Wrapped
from vicinal.types import Head

Key = tuple[StatisticsConfig, str]  # all that the pass of a still model depends on


@dataclass(frozen=True, eq=False)
class Pass:
    """What a model has said of every batch of a stream, and what came of that alone."""

    told: list[Told]
    outcome: Outcome


class Passes:
    """The passes over one stream, each run once; `keys` are those of all adapters to come, see `pass_of`.

    Made for adapters of the same source model that have seen nothing yet. They know the stream only by what
    they are told: for one stream more, or to be saved, they are of no use.
    """

    def __init__(self, keys: Sequence[Key | None], stream: Stream) -> None:
        self._shared = {key for key, count in Counter(keys).items() if key is not None and count > 1}
        self._stream, self._run = stream, dict[Key, Pass]()

    def run(self, adapter: Adapter) -> Outcome:
        """Return an adapter's predictions over the stream; their time has that of the pass in it."""
        key = pass_of(adapter)
        if key is None or key not in self._shared:
            return run_online(adapter, self._stream)
        if key not in self._run:
            self._run[key] = _pass_alone(adapter, self._stream)
        known = self._run[key]
        alike = adapter.settings.output_temperature == 1
        if isinstance(adapter, Erm | BatchNormOnly) and alike:  # nothing comes after it
            return known.outcome
        outcome = run_online(adapter, self._stream, told=known.told)
        return replace(outcome, seconds=outcome.seconds + known.outcome.seconds)


def pass_of(adapter: Adapter) -> Key | None:
    """Return what the pass of an adapter depends on besides the stream; None where nobody else may run it.

    A step that is recorded on a GPU is one piece, and what is left of it would take longer than all of it.
    Balanced statistics follow what a method itself predicted.
    """
    settings = adapter.settings
    if settings.statistics.kind == "balanced":
        return None
    plain = settings.augment is None and not settings.episodic and not isinstance(adapter.model, Wrapped)
    recorded = adapter.records and next(adapter.model.parameters()).is_cuda
    return (settings.statistics, settings.precision) if adapter.still and plain and not recorded else None


def _pass_alone(adapter: Adapter, stream: Stream) -> Pass:
    settings, told = adapter.settings, list[Told]()
    same = {"statistics": settings.statistics, "precision": settings.precision}
    alone = adapt(adapter.source, "bn", **same, output_temperature=1.0)  # type: ignore[arg-type]
    alone.recorder.refused = "run as those run it who share it, so that their time is their own"

    def keep(z: Tensor, logits: Tensor, head: Head) -> None:
        told.append((z, logits))

    alone.observer = keep
    return Pass(told, run_online(alone, stream))
