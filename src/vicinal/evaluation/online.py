"""One adapter over one stream gives one record. Labels meet predictions here and nowhere earlier."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.data.streams import Stream
from vicinal.errors import ConfigError, DataError
from vicinal.evaluation import metrics
from vicinal.evaluation.record import Record
from vicinal.versions import made_by

OnBatch = Callable[[int], None]
Told = tuple[Tensor, Tensor]  # z and logits of a batch


@dataclass(frozen=True)
class Outcome:
    """What an adapter said along a stream: probabilities in order of arrival, and how long it took."""

    probabilities: Tensor  # (M, C)
    seconds: float


@dataclass(frozen=True)
class Setup:
    """Who is measured on what: the part of a record that is known before the run."""

    dataset: str
    target: str
    backbone: str
    algorithm: str
    method: str
    seed: int
    protocol: dict[str, Any]


def run_online(
    adapter: Adapter, stream: Stream, on_batch: OnBatch | None = None, told: Sequence[Told] | None = None
) -> Outcome:
    """Return an adapter's predictions over a stream, batch by batch, each made once and never revised.

    `told` are features and logits of every batch, where another has run the pass (`evaluation.together`).
    """
    device = next(adapter.model.parameters()).device
    outputs, seconds = [], 0.0
    for index, x in enumerate(stream.batches(device)):
        started = time.perf_counter()
        with _knowing(adapter, None if told is None else told[index]):
            outputs.append(adapter(x).softmax(-1).cpu())  # the copy waits: the clock sees it all
        seconds += time.perf_counter() - started
        if on_batch is not None:
            on_batch(index + 1)
    return Outcome(torch.cat(outputs), seconds)


@contextmanager
def _knowing(adapter: Adapter, told: Told | None) -> Iterator[None]:
    """Let an adapter know of a pass that another has run; of no other batch but this one."""
    if told is not None and not adapter.still:
        raise ConfigError("only a method whose model stays as it is can do with another's pass")
    adapter.told = told
    try:
        yield
    finally:
        adapter.told = None


def score(adapter: Adapter, stream: Stream, outcome: Outcome, labels: Tensor, setup: Setup) -> Record:
    """Return the record of a run; `labels` are those of all images of the stream's domain."""
    if len(labels) != len(stream.images):
        raise DataError(f"{len(labels)} labels for {len(stream.images)} images of target '{setup.target}'")
    truth, probabilities = labels[stream.order.cpu()].cpu(), outcome.probabilities
    right = (probabilities.argmax(-1) == truth).cumsum(0)
    ends = [
        min(end, len(right))
        for end in range(stream.batch_size, len(right) + stream.batch_size, stream.batch_size)
    ]
    settings = adapter.settings
    return Record(
        dataset=setup.dataset,
        target=setup.target,
        backbone=setup.backbone,
        algorithm=setup.algorithm,
        method=setup.method,
        statistics=settings.statistics.kind,
        predict=settings.predict,
        stream=stream.kind,
        seed=setup.seed,
        batch_size=stream.batch_size,
        **{name: metrics.METRICS[name](probabilities, truth) for name in ("accuracy", "ece", "nll", "brier")},
        curve=[round(int(right[end - 1]) / end, 6) for end in ends],  # all digits would be most of a record
        seconds=outcome.seconds,
        images_per_second=len(truth) / max(outcome.seconds, 1e-9),
        reliability=metrics.reliability(probabilities, truth),
        protocol={
            **setup.protocol,
            "adapter": asdict(settings),
            "images": len(truth),
            "reset": "before every batch" if settings.episodic else _resets(adapter.recovered),
        },
        versions=made_by(),
    )


def _resets(recovered: int) -> str:
    return f"after {recovered} batches, whose predictions were not numbers" if recovered else "never"


def evaluate_online(adapter: Adapter, stream: Stream, labels: Tensor, setup: Setup) -> Record:
    """Return the record of one adapter over one stream."""
    return score(adapter, stream, run_online(adapter, stream), labels, setup)
