"""Which normalization statistics a pass runs on, for every network with BatchNorm layers.

| kind     | a batch is predicted on                                  |
|----------|----------------------------------------------------------|
| source   | source statistics                                        |
| batch    | its own                                                  |
| blend    | its own, mixed with the source's                         |
| stream   | an average over the stream that starts from the source's |
| balanced | the same, in which all classes are to count alike        |

The pass that predicts a batch is also the one that takes it into the average: each layer sees what the layers
before it have normalized that way. An update that comes after it is followed by a pass that carries the
average along. Updates run on the same values, but their gradient is that of batch statistics (batch
renormalization), save on source statistics: with an average inside the gradient every method collapses.
Balanced, an image counts the less the more frequent its class is along the stream, and so much of the
statistics is the source's as classes are missing (`vicinal.adapters.balance`). A batch of one cannot make
statistics: it joins the stream average and runs on it; on batch statistics that is an average over those that
came alone. Networks without BatchNorm have no such statistics and all kinds are one.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vicinal.adapters.activations import Activations, Use
from vicinal.adapters.balance import ClassBalance, Weighed, part_of
from vicinal.adapters.bookkeeping import Uses
from vicinal.adapters.fused_norm import on_average, renormalizing
from vicinal.adapters.layers import Lent, batch_norms, normalized_by, renormalized, running, running_moments
from vicinal.errors import ConfigError
from vicinal.fields import check_fields
from vicinal.functional.normalization import (
    Moments,
    blend_weight,
    moment_shift,
    moments_of,
    renormalization,
    stream_weight,
)
from vicinal.models.classifier import Classifier
from vicinal.models.wrap import Wrapped

Kind = Literal["batch", "source", "blend", "stream", "balanced"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class StatisticsConfig:
    """How statistics are averaged."""

    kind: Kind = "stream"
    source_images: int = 20  # the source's statistics count as this many images
    floor: float = 0.05  # the newest `source_images` images never weigh less than this
    follow_updates: bool = True  # carry the average along when an update moves the features

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind not in KINDS:
            raise ConfigError(f"unknown statistics '{self.kind}': choose from {', '.join(KINDS)}")
        if self.source_images < 1 or not 0 <= self.floor <= 1:
            raise ConfigError("statistics need source_images of at least 1 and a floor between 0 and 1")

    @property
    def along_stream(self) -> bool:
        """Whether batches are predicted on an average over the stream."""
        return self.kind in ("stream", "balanced")


class NormStatistics(nn.Module):
    """The statistics of a model's BatchNorm layers: it sets the mode of each pass and keeps the averages.

    The layers' own running buffers hold what the next prediction runs on; the buffers here hold the source's
    moments and the stream's. Those of a frozen copy go `beside` the model's and take from these what an
    image counts.
    """

    seen: Tensor  # images that have joined the stream's average, or what they count

    def __init__(
        self,
        model: Classifier | Wrapped,
        config: StatisticsConfig,
        beside: "NormStatistics | None" = None,
    ) -> None:
        super().__init__()
        self.config = config
        # In a tuple, so that the layers stay the model's and are not registered a second time.
        self._layers = tuple(batch_norms(model))
        self._activations = Activations(model)
        self._before: dict[Use, Moments] = {}  # of the batch's first pass, under the weights it met
        self._settled = False  # whether the batch is in the average
        self._moved = False  # whether weights have moved since
        self._weights: dict[int, Tensor] = {}  # of this step: what a batch of so many images weighs
        device = next(model.parameters()).device
        self.register_buffer("seen", torch.zeros((), dtype=torch.double, device=device))
        self.weighed: Weighed | None = None  # the batch of this step, where classes are balanced
        self._balance: tuple[ClassBalance, ...] = ()
        if config.kind == "balanced" and self._layers:
            if beside is None:
                self.balance = ClassBalance(model, config.source_images, config.floor)
            self._balance = (self.balance,) if beside is None else beside._balance
        self._beside = () if beside is None else (beside,)
        # Balanced, the source's moments are a part of the average and are carried along as it is.
        owners = ("source", "stream", "home") if self._balance else ("source", "stream")
        for index, layer in enumerate(self._layers):
            for what, value in running_moments(layer)._asdict().items():
                precise = torch.promote_types(value.dtype, torch.float32)
                for owner in owners:
                    self.register_buffer(f"{owner}_{what}_{index}", value.to(precise, copy=True))

    def begin(self, x: Tensor | None = None) -> None:
        """Expect a new batch; forget the step before, finished or not."""
        self._before, self._settled, self._moved, self._weights = {}, False, False, {}
        if self._beside:
            self.weighed = self._beside[0].weighed
        elif self._balance:
            self.weighed = self.balance.unweighed() if x is None else self.balance.weigh(x)

    def observed(self, images: int) -> bool:
        """Say whether the moments from before this step's updates are known, or will not be needed."""
        joins = self._averages(images) and self._owner(images) == "stream"
        return bool(self._before) or not (self.config.follow_updates and joins)

    def one_pass(self, images: int) -> bool:
        """Say whether the pass of an update of such a batch can be the one that predicts it."""
        return (
            not self._layers or self.config.kind == "source" or (self.config.kind == "batch" and images > 1)
        )

    @property
    def per_batch(self) -> bool:
        """Whether each batch is predicted on statistics of its own, at least in part."""
        return bool(self._layers) and self.config.kind in ("batch", "blend")

    @contextmanager
    def updating(self, images: int, *, views: int = 1) -> Iterator[None]:
        """Set the mode of a pass whose gradient is taken; the first one of a step is observed.

        `views` says how often the batch is in it, one view after the other; 0: it is over other images too.
        """
        if not self._averages(images):
            with running(self._layers, on_batch=self.config.kind != "source" and images > 1):
                yield
            return
        uses, owner, share = Uses(), self._owner(images), self._share(images)
        told = self.weighed
        if told is not None:
            told = told.seen_in(views) if views else self._balance[0].unweighed()

        def values(index: int, x: Tensor) -> Lent | Tensor:
            layer, average, use = self._layers[index], self._stored(owner, index), uses.next(index)
            rectify = self._activations.follows(use, layer)
            if told is not None:
                part = part_of(x, told, average, self._stored("home", index), share, None)
                uses.batch[use] = part.batch
                if images == 1:
                    return normalized_by(part.used)
                return renormalized(layer, *renormalization(moments_of(x), part.used, layer.eps))
            if images == 1:  # no statistics of its own: it runs on the average, in gradient as well
                instead, uses.batch[use], _ = on_average(layer, x, average, share, rectify=rectify)
            else:
                instead, uses.batch[use] = renormalizing(layer, x, average, share, rectify=rectify)
            return self._put_out(use, instead, rectify)

        with self._activations.saved(), running(self._layers, values, on_batch=images > 1):
            yield
        self._before = self._before or uses.batch

    @contextmanager
    def predicting(self, images: int) -> Iterator[None]:
        """Set the mode of a pass that predicts; the first one of a step takes the batch into the average.

        Later ones run on what the first has left behind. No gradient is taken of any.
        """
        if self._settled or not self._averages(images):
            with running(self._layers, on_batch=self.config.kind == "batch" and images > 1):
                yield
            return
        with self._joining(images):
            yield
        if self._owner(images) == "stream":
            self.seen += self._counts(images)

    def moved(self) -> None:
        """Take note that an update has moved the weights."""
        self._moved = True

    @torch.no_grad()
    def carry(self, model: nn.Module, x: Tensor) -> None:
        """Carry the average along with updates that came after the batch had joined it, in a pass of its own.

        What is predicted before the update joins under weights that are then given up; without this the next
        batch would meet an average of features that are no more.
        """
        late = self._settled and self._moved and self.config.follow_updates
        if late and self._averages(len(x)) and self._owner(len(x)) == "stream":
            with self._joining(len(x)):  # of which it has no further share
                model(x)

    @contextmanager
    def _joining(self, images: int) -> Iterator[None]:
        """Set the mode of a pass that runs on the average with the batch in it, and keep that average."""
        uses, owner, share = Uses(), self._owner(images), self._share(images)
        follows, told = self.config.follow_updates and owner == "stream", self.weighed

        def values(index: int, x: Tensor) -> Lent | Tensor:
            layer, average, use = self._layers[index], self._stored(owner, index), uses.next(index)
            before = self._before.get(use) if follows else None
            if told is not None:
                part = part_of(x, told, average, self._stored("home", index), share, before)
                uses.batch[use], uses.average[index], uses.home[index], uses.used[index] = part
                return normalized_by(part.used)
            rectify = self._activations.follows(use, layer)
            made = on_average(layer, x, average, share, before, rectify=rectify)
            instead, uses.batch[use], uses.average[index] = made
            uses.used[index] = uses.average[index]
            return self._put_out(use, instead, rectify)

        with self._activations.saved(), running(self._layers, values, on_batch=False):
            yield
        # Only now: a pass that fails leaves the averages as they were.
        self._before, self._settled, self._moved, self._weights = uses.batch, True, False, {}
        joined = {"stream": uses.average, "home": uses.home} if owner == "stream" else {}
        self._keep({"running": uses.used, **joined})

    def _put_out(self, use: Use, instead: Lent | Tensor, rectified: bool) -> Lent | Tensor:
        """Return what a layer runs on, or what it is to put out, of which the activations take note."""
        if isinstance(instead, Tensor):
            self._activations.put_out(use, instead, rectified=rectified)
        return instead

    def end(self, logits: Tensor) -> None:
        """Take note of what was predicted for the batch."""
        if self.weighed is not None and not self._beside:
            self.balance.keep(self.weighed, logits)

    @torch.no_grad()
    def _keep(self, averages: Mapping[str, dict[int, Moments]]) -> None:
        """Write averages where their owners have them; the running ones are what layers run on."""
        pairs = [
            pair
            for owner, by_layer in averages.items()
            for index, average in by_layer.items()
            for pair in zip(self._stored(owner, index), average, strict=True)
        ]
        torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])

    @torch.no_grad()
    def settle(self, model: nn.Module, x: Tensor) -> None:
        """Take the batch into the average under the current weights, in a pass of its own."""
        if not self._settled and self._averages(len(x)):
            with self.predicting(len(x)):
                model(x)

    @torch.no_grad()
    def observe(self, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits on the batch's statistics and how far these are from the source's, (layers,).

        Layers come in the order they run; each sees what those before it have normalized by the batch.
        """
        logits, moments = self._on_batch(model, x)
        shifts = [moment_shift(self._stored("source", index), batch) for index, batch in moments.items()]
        return logits, torch.stack(shifts)

    @torch.no_grad()
    def freeze(self, model: nn.Module, x: Tensor) -> None:
        """Make what a prediction of x runs on what every later pass in evaluation mode runs on.

        One image runs on the average over the stream, of which it is taken to be a part, if there is any.
        """
        if self.config.kind == "batch" and len(x) > 1:
            self._keep({"running": self._on_batch(model, x)[1]})
        elif len(x) == 1 and bool(self.seen):
            self._keep(
                {"running": {index: self._stored("stream", index) for index in range(len(self._layers))}}
            )
        else:
            self.settle(model, x)

    def _on_batch(self, model: nn.Module, x: Tensor) -> tuple[Tensor, dict[int, Moments]]:
        """Return logits on the batch's statistics, and these by layer."""
        moments: dict[int, Moments] = {}

        def collect(index: int, inputs: Tensor) -> Lent:
            moments[index] = moments_of(inputs)
            return {}

        with running(self._layers, collect, on_batch=True):
            return model(x), moments

    def _averages(self, images: int) -> bool:
        """Say whether this batch is predicted on an average: asked for, or the only way with one image."""
        kind = self.config.kind
        return bool(self._layers) and (
            kind == "blend" or self.config.along_stream or (kind == "batch" and images == 1)
        )

    def _owner(self, images: int) -> str:
        """Return whose moments a batch is mixed with: the stream's, or a blend's, the source's."""
        return "source" if self.config.kind == "blend" and images > 1 else "stream"

    def _share(self, images: int) -> Tensor:
        """Return what a batch weighs in the mixture, in the precision of the averages."""
        config = self.config
        if images in self._weights:  # for all passes of a step, save those after it has joined the average
            return self._weights[images]
        if self._owner(images) == "source":
            share = torch.full_like(self.seen, blend_weight(images, config.source_images))
        elif self._settled:  # it is in the average already
            share = torch.zeros_like(self.seen)
        else:
            share = stream_weight(self._counts(images), self.seen, config.source_images, config.floor)
        self._weights[images] = share.to(self.get_buffer("stream_mean_0").dtype)
        return self._weights[images]

    def _counts(self, images: int) -> int | Tensor:
        """Return what so many images count together."""
        each = None if self.weighed is None else self.weighed.each
        return images if each is None or len(each) != images else each.sum()

    def _stored(self, owner: str, index: int) -> Moments:
        if owner == "running":
            return running_moments(self._layers[index])
        return Moments(self.get_buffer(f"{owner}_mean_{index}"), self.get_buffer(f"{owner}_variance_{index}"))
