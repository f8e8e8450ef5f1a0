"""Streams of domains that a model never saw: source data, with labels, played as if it were a target's."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.checkpoint import Trained
from vicinal.data.domains import LabelledImages, SourceDomain
from vicinal.data.pixels import joined
from vicinal.data.streams import Stream, label_shift_order, online_order
from vicinal.data.transforms import HARDENINGS, to_float
from vicinal.errors import ConfigError
from vicinal.training.config import OutOfFoldConfig
from vicinal.types import Head


@dataclass(frozen=True)
class Fold:
    """A model and the source domains that were kept from it."""

    trained: Trained
    left_out: tuple[SourceDomain, ...]


@dataclass(frozen=True, eq=False)
class LeftOutStream:
    """One stream for one left-out model; the labels are a source's own, to teach phi and to score rules."""

    name: str
    domain: str
    trained: Trained
    stream: Stream
    labels: Tensor  # in order of arrival


def folds(count: int, leave_out: int) -> list[tuple[int, ...]]:
    """Return, for each left-out model, the positions of the domains it goes without.

    Every model goes without `leave_out` neighbors in the list of domains, which wraps around: each domain is
    left out once, the first ones once more where the count does not come out even. With many sources one
    domain less is hardly a shift: 0 means two for four sources or more, one for fewer.
    """
    size = leave_out or (2 if count >= 4 else 1)
    if size >= count:
        raise ConfigError(
            f"cannot leave out {size} of {count} source domains: leave at least one to train on"
        )
    starts = range(0, count, size)
    return [tuple(sorted((start + step) % count for step in range(size))) for start in starts]


def left_out_streams(every: Sequence[Fold], config: OutOfFoldConfig, seed: int) -> list[LeftOutStream]:
    """Return the natural streams of all left-out domains, and those with drawn marginals or hardening."""
    # All steps of all streams are stacked when phi is fitted: the smallest domain bounds the batch.
    smallest = min(len(source.train) + len(source.val) for fold in every for source in fold.left_out)
    longest = config.stream_images or smallest
    config = replace(config, batch_size=min(config.batch_size, smallest, longest))
    return [
        stream
        for fold in every
        for position, source in enumerate(fold.left_out)
        for stream in streams_of(fold.trained, source.name, _whole(source), config, seed + position)
        if len(stream.stream.order) >= config.batch_size  # a drawn marginal may leave less than one batch
    ]


def _whole(source: SourceDomain) -> LabelledImages:
    images = joined([source.train.images, source.val.images])
    return LabelledImages(images, torch.cat([source.train.labels, source.val.labels]))


def streams_of(
    trained: Trained, domain: str, whole: LabelledImages, config: OutOfFoldConfig, seed: int
) -> list[LeftOutStream]:
    """Return a domain in natural order, named after it, with drawn marginals, and hardened."""
    natural = online_order(len(whole), seed)
    made = [_stream("", domain, trained, whole, natural, config)]
    for alpha in config.marginals:
        order = label_shift_order(whole.labels, alpha, seed)
        made.append(_stream(f" Dirichlet {alpha:g}", domain, trained, whole, order, config))
    for name in config.hardenings:
        plain = _stream(f" {name}", domain, trained, whole, natural, config)
        made.append(_hardened(plain, name))
    return made


def _stream(
    kind: str,
    domain: str,
    trained: Trained,
    whole: LabelledImages,
    order: Tensor,
    config: OutOfFoldConfig,
) -> LeftOutStream:
    # Whole batches only: what phi is fitted on is stacked step by step.
    usable = min(len(order), config.stream_images or len(order))
    kept = order[: usable // config.batch_size * config.batch_size]
    stream = Stream("online", whole.images, kept, config.batch_size)
    return LeftOutStream(domain + kind, domain, trained, stream, whole.labels[kept])


def _hardened(plain: LeftOutStream, name: str) -> LeftOutStream:
    """Return the stream with each of its images, and no others, transformed."""
    images, order = plain.stream.images, plain.stream.order
    parts = [HARDENINGS[name](to_float(images[part], images.device)) for part in torch.split(order, 256)]
    pixels = (torch.cat(parts) * 255).round().to(torch.uint8)
    stream = Stream(plain.stream.kind, pixels, torch.arange(len(order)), plain.stream.batch_size)
    return replace(plain, stream=stream)


@dataclass(frozen=True, eq=False)
class Lesson:
    """What an adapter saw at every step of a left-out stream, stacked: T steps of N samples."""

    z: Tensor  # (T, N, d)
    logits: Tensor  # (T, N, C)
    head: Head  # (T, C, d), (T, C)
    y: Tensor  # (T, N)


@dataclass(frozen=True, eq=False)
class Played:
    """The outcome of one simulated stream."""

    probabilities: Tensor  # (M, C), as the adapter predicted
    lesson: Lesson


def play(adapter: Adapter, left_out: LeftOutStream) -> Played:
    """Run an adapter online over a left-out stream; return its predictions and what phi can learn from."""
    seen: list[tuple[Tensor, Tensor, Head]] = []
    adapter.observer = lambda z, logits, head: seen.append((z, logits, Head(*(t.clone() for t in head))))
    device = next(adapter.model.parameters()).device
    outputs = [adapter(x).softmax(-1) for x in left_out.stream.batches(device)]
    z, logits, heads = zip(*seen, strict=True)
    head = Head(torch.stack([h.weight for h in heads]), torch.stack([h.bias for h in heads]))
    y = left_out.labels.to(device).view(len(seen), -1)
    return Played(torch.cat(outputs), Lesson(torch.stack(z), torch.stack(logits), head, y))


def predictions(adapter: Adapter, left_out: LeftOutStream) -> Tensor:
    """Run an adapter online over a left-out stream; return its predictions (M, C)."""
    device = next(adapter.model.parameters()).device
    return torch.cat([adapter(x).softmax(-1) for x in left_out.stream.batches(device)])


def play_all(build: Callable[[Trained], Adapter], streams: Sequence[LeftOutStream]) -> list[Played]:
    """Play every stream from the start."""
    return [play(adapter, stream) for adapter, stream in from_the_start(build, streams)]


def predict_all(build: Callable[[Trained], Adapter], streams: Sequence[LeftOutStream]) -> list[Tensor]:
    """Return the predictions (M, C) on every stream, each from the start."""
    return [predictions(adapter, stream) for adapter, stream in from_the_start(build, streams)]


def from_the_start(
    build: Callable[[Trained], Adapter], streams: Sequence[LeftOutStream]
) -> Iterator[tuple[Adapter, LeftOutStream]]:
    """Yield every stream with an adapter that has seen nothing yet; streams of one model share it, reset."""
    adapter: Adapter | None = None
    owner: Trained | None = None
    for stream in streams:
        if adapter is None or stream.trained is not owner:
            adapter, owner = build(stream.trained), stream.trained
        else:
            adapter.reset()
        yield adapter, stream
