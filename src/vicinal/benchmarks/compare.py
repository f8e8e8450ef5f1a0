"""Several methods over the same streams from the same trained model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import adapt, what_holds
from vicinal.checkpoint import Trained
from vicinal.data.domains import Roles, TargetDomain
from vicinal.data.pixels import resident
from vicinal.data.streams import Stream, StreamSpec, make_stream
from vicinal.errors import ConfigError
from vicinal.evaluation.online import Outcome, Setup, score
from vicinal.evaluation.record import Record
from vicinal.evaluation.together import Passes, pass_of


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
    """Yield the result of every entry on every target, all on the very same stream.

    A joint stream, of several targets one after another or mixed, gives one result for all of them.
    """

    def made(entry: Entry) -> Adapter:
        return adapt(trained, entry.method, **{"seed": seed, **entry.options})

    keys = [pass_of(made(entry)) for entry in entries]  # refused before anything is measured
    if spec.joint and len(roles.targets) < 2:
        raise ConfigError(f"a {spec.kind} stream needs two target domains or more: give --target again")
    groups = [roles.targets] if spec.joint else [(target,) for target in roles.targets]
    for group in groups:
        stream, answers = _stream(trained, group, roles, spec, seed)
        passes = Passes(keys, stream)
        for entry in entries:
            adapter = made(entry)
            setup = Setup(
                dataset=dataset,
                target="+".join(target.name for target in group),
                backbone=trained.backbone,
                algorithm=source_algorithm(trained),
                method=entry.method,
                seed=seed,
                protocol={**_protocol(trained, spec, entry), "parameters": _count(adapter)},
            )
            outcome = passes.run(adapter)
            record = score(adapter, stream, outcome, answers, setup)
            yield Result(_by_domain(record, stream, outcome, answers, group), stream, outcome)
            if on_done is not None:
                on_done()


def _stream(
    trained: Trained, group: Sequence[TargetDomain], roles: Roles, spec: StreamSpec, seed: int
) -> tuple[Stream, Tensor]:
    """Return the stream of some targets, where the model lives if it fits, and the labels behind it."""
    device = next(trained.model.parameters()).device
    answers = [roles.answers[target.name] for target in group]
    images = resident([target.images for target in group], device)
    return make_stream(spec, images, answers, seed), torch.cat(answers)


def _by_domain(
    record: Record, stream: Stream, outcome: Outcome, answers: Tensor, group: Sequence[TargetDomain]
) -> Record:
    """Return the record of a joint stream with the accuracy on each of its domains."""
    if len(group) < 2:
        return record
    origin = torch.cat([torch.full((len(target.images),), k) for k, target in enumerate(group)])
    right = (outcome.probabilities.argmax(-1) == answers[stream.order]).float()
    shares = {target.name: float(right[origin[stream.order] == k].mean()) for k, target in enumerate(group)}
    return replace(record, protocol={**record.protocol, "accuracy_by_domain": shares})


def source_algorithm(trained: Trained) -> str:
    """Return how theta was trained: `neighbor` trains its phi on a theta that is ERM's."""
    return "erm" if trained.algorithm == "neighbor" else trained.algorithm


def _count(adapter: Adapter) -> int:
    """Return the parameters of the model and of the nets that the method runs besides it."""
    return sum(parameter.numel() for parameter in adapter.parameters())


def _protocol(trained: Trained, spec: StreamSpec, entry: Entry) -> dict[str, Any]:
    alpha = {"alpha": spec.alpha} if spec.kind == "label_shift" else {}
    return {
        "training": trained.config,
        "provenance": trained.provenance,
        "trained_as": trained.algorithm,
        "selection": f"model on source validation images; {_selection(trained, entry)}",
        **alpha,
    }


def _selection(trained: Trained, entry: Entry) -> str:
    """Return what of a method's options was chosen, and what was given."""
    chosen = sorted({*what_holds(trained, entry.method, entry.options)} - {*entry.options})
    what = f"{', '.join(chosen)} on left-out source domains" if chosen else "nothing else"
    return f"{what}; given: {', '.join(sorted(entry.options))}" if entry.options else what
