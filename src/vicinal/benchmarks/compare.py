"""Several methods over the same streams from the same trained model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vicinal.adapters.contract import adapt
from vicinal.checkpoint import Trained
from vicinal.data.domains import Roles, TargetDomain
from vicinal.data.streams import Stream, label_shift_order, online_order
from vicinal.errors import UnknownNameError
from vicinal.evaluation.online import Outcome, Setup, run_online, score
from vicinal.evaluation.record import Record

STREAMS = ("online", "label_shift")


@dataclass(frozen=True)
class StreamSpec:
    """Which stream to make of a target: its kind, its batch size, and alpha of a drawn class marginal."""

    kind: str = "online"
    batch_size: int = 20
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in STREAMS:
            raise UnknownNameError("stream", self.kind, STREAMS)


@dataclass(frozen=True)
class Entry:
    """A method and the options it runs with."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Result:
    """One record and the predictions behind it."""

    record: Record
    stream: Stream
    outcome: Outcome


def make_stream(target: TargetDomain, answers: Tensor, spec: StreamSpec, seed: int) -> Stream:
    """Return a stream of a target; labels decide the order of a label-shifted one and go no further."""
    if spec.kind == "label_shift":
        order = label_shift_order(answers, spec.alpha, seed)
    else:
        order = online_order(len(target.images), seed)
    return Stream(spec.kind, target.images, order, spec.batch_size)


def compare(
    trained: Trained,
    roles: Roles,
    entries: Sequence[Entry],
    spec: StreamSpec,
    seed: int,
    *,
    dataset: str,
    on_done: Callable[[], None] | None = None,
) -> Iterator[Result]:
    """Yield the result of every entry on every target, all on the very same stream."""
    for entry in entries:  # one that cannot be served is refused before anything is measured
        adapt(trained, entry.method, **{"seed": seed, **entry.options})
    for target in roles.targets:
        answers = roles.answers[target.name]
        stream = make_stream(target, answers, spec, seed)
        for entry in entries:
            adapter = adapt(trained, entry.method, **{"seed": seed, **entry.options})
            setup = Setup(
                dataset=dataset,
                target=target.name,
                backbone=trained.backbone,
                algorithm=source_algorithm(trained),
                method=entry.method,
                seed=seed,
                protocol=_protocol(trained, spec),
            )
            outcome = run_online(adapter, stream)
            yield Result(score(adapter, stream, outcome, answers, setup), stream, outcome)
            if on_done is not None:
                on_done()


def source_algorithm(trained: Trained) -> str:
    """Return how theta was trained: `neighbor` trains its phi on a theta that is ERM's."""
    return "erm" if trained.algorithm == "neighbor" else trained.algorithm


def _protocol(trained: Trained, spec: StreamSpec) -> dict[str, Any]:
    alpha = {"alpha": spec.alpha} if spec.kind == "label_shift" else {}
    return {
        "training": trained.config,
        "provenance": trained.provenance,
        "trained_as": trained.algorithm,
        "prediction": "after the update, on the batch that made it",
        "selection": "source validation; rule and step sizes on left-out source domains",
        **alpha,
    }
