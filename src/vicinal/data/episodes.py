"""Training episodes: batches balanced over domains, drawn in order, made ahead where that helps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vicinal.data.augment import Augment, Draws
from vicinal.data.domains import SourceDomain
from vicinal.data.feeding import fetched_by, made_ahead, workers_for
from vicinal.data.pixels import gather
from vicinal.data.transforms import to_float


class Batch(NamedTuple):
    """Images in [0, 1] and their labels."""

    x: Tensor
    y: Tensor


class Draw(NamedTuple):
    """What one batch is made of: so many images, spread evenly over some domains."""

    domains: Sequence[int]
    size: int


# Number of source domains, batch size, random numbers -> the batches of one iteration.
Drawing = Callable[[int, int, torch.Generator], Sequence[Draw]]


class Episode(NamedTuple):
    """The batches of one iteration, and the state of the random numbers after they were drawn."""

    batches: tuple[Batch, ...]
    state: Tensor


class _Chosen(NamedTuple):
    """One batch as positions: which images of which domains, and how they are augmented."""

    domains: Sequence[int]
    positions: Sequence[Tensor]
    draws: Draws | None


class _Gathered(NamedTuple):
    images: Tensor
    labels: Tensor
    draws: Draws | None


@dataclass(frozen=True, eq=False)
class Episodes:
    """A seeded source of training episodes. Images are drawn with replacement, balanced over domains.

    All random numbers are drawn one iteration after another from `state`, so that the same state gives the
    same episodes, whatever is made ahead.
    """

    sources: Sequence[SourceDomain]
    drawing: Drawing
    batch_size: int
    augment: Augment | None
    device: torch.device

    def starting_at(self, state: Tensor, count: int) -> Iterator[Episode]:
        """Yield `count` episodes, the random numbers going on from a generator's state."""
        images = [source.train.images for source in self.sources]
        plans = self._plans(state, count)
        for gathered, after in made_ahead(plans, self._gather, workers_for(images, self.device)):
            yield Episode(tuple(self._finished(batch) for batch in gathered), after)

    def _plans(self, state: Tensor, count: int) -> Iterator[tuple[list[_Chosen], Tensor]]:
        generator = torch.Generator()
        generator.set_state(state)
        for _ in range(count):
            wanted = self.drawing(len(self.sources), self.batch_size, generator)
            chosen = [self._choose(draw, generator) for draw in wanted]
            yield chosen, generator.get_state()

    def _choose(self, draw: Draw, generator: torch.Generator) -> _Chosen:
        """Return positions of images, spread evenly, and the numbers their augmentation takes."""
        positions = []
        for index, domain in enumerate(draw.domains):
            share = draw.size // len(draw.domains) + (index < draw.size % len(draw.domains))
            available = len(self.sources[domain].train)
            positions.append(torch.randint(available, (share,), generator=generator))
        height, width = self.sources[0].train.images.shape[-2:]
        augment = self.augment
        draws = None if augment is None else augment.draw(draw.size, height, width, generator)
        return _Chosen(draw.domains, positions, draws)

    def _gather(self, plan: tuple[list[_Chosen], Tensor]) -> tuple[list[_Gathered], Tensor]:
        chosen, state = plan
        return [self._take(batch) for batch in chosen], state

    def _take(self, chosen: _Chosen) -> _Gathered:
        parts = [self.sources[domain].train for domain in chosen.domains]
        pinned = fetched_by(self.device)
        images = gather([(p.images, at) for p, at in zip(parts, chosen.positions, strict=True)], pinned)
        labels = torch.cat([p.labels.cpu()[at] for p, at in zip(parts, chosen.positions, strict=True)])
        return _Gathered(images, labels.pin_memory() if pinned else labels, chosen.draws)

    def _finished(self, batch: _Gathered) -> Batch:
        """Return a batch on the device, augmented there."""
        labels = batch.labels.to(self.device, non_blocking=True)
        if self.augment is None or batch.draws is None:
            return Batch(to_float(batch.images, self.device), labels)
        images = batch.images.to(self.device, non_blocking=True)
        return Batch(self.augment.apply(images, batch.draws), labels)


def from_all(count: int, batch_size: int, generator: torch.Generator) -> tuple[Draw, ...]:
    """Return one batch over all domains, as many images as the two batches of a meta iteration."""
    return (Draw(range(count), 2 * batch_size),)


def split_meta(count: int, batch_size: int, generator: torch.Generator) -> tuple[Draw, ...]:
    """Return a batch over the meta-source domains and one of a random meta-target domain."""
    target = int(torch.randint(count, (1,), generator=generator))
    # A lone domain, as a left-out model of two sources has, plays both parts: no shift is left to simulate.
    rest = [position for position in range(count) if position != target or count == 1]
    return Draw(rest, batch_size), Draw([target], batch_size)


def from_one(count: int, batch_size: int, generator: torch.Generator) -> tuple[Draw, ...]:
    """Return one batch of a random domain."""
    return (Draw([int(torch.randint(count, (1,), generator=generator))], batch_size),)
