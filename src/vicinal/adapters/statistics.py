"""Which normalization statistics a pass runs on, for every network with BatchNorm layers.

| kind   | the update runs on | the prediction runs on                                   |
|--------|--------------------|----------------------------------------------------------|
| source | source statistics  | source statistics                                        |
| batch  | the batch's        | the batch's                                              |
| blend  | the batch's        | the batch's, mixed with the source's                     |
| stream | the batch's        | an average over the stream that starts from the source's |

Updates run on the batch's statistics because with stream statistics inside the gradient every method
collapses. A batch of one cannot make statistics: it joins the stream average and runs on it. Networks without
BatchNorm have no such statistics and all kinds are one.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vicinal.errors import ConfigError
from vicinal.functional.normalization import (
    Moments,
    blend_weight,
    mix,
    moment_shift,
    moments_of,
    stream_weight,
    transport,
)

Kind = Literal["batch", "source", "blend", "stream"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class StatisticsConfig:
    """How statistics are averaged."""

    kind: Kind = "stream"
    source_images: int = 20  # the source's statistics count as this many images
    floor: float = 0.05  # the newest `source_images` images never weigh less than this
    follow_updates: bool = True  # carry the average along when an update moves the features

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"unknown statistics '{self.kind}': choose from {', '.join(KINDS)}")
        if self.source_images < 1 or not 0 <= self.floor <= 1:
            raise ConfigError("statistics need source_images of at least 1 and a floor between 0 and 1")


class NormStatistics(nn.Module):
    """The statistics of a model's BatchNorm layers: it sets the mode of each pass and keeps the averages.

    The layers' own running buffers hold what the next prediction runs on; the buffers here hold the source's
    moments and the stream's.
    """

    seen: Tensor

    def __init__(self, model: nn.Module, config: StatisticsConfig) -> None:
        super().__init__()
        self.config = config
        # In a tuple, so that the layers stay the model's and are not registered a second time.
        self._layers = tuple(
            layer
            for layer in model.modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        )
        self._before: dict[int, Moments] = {}
        device = next(model.parameters()).device
        self.register_buffer("seen", torch.zeros((), dtype=torch.long, device=device))
        for index, layer in enumerate(self._layers):
            layer.momentum = 0.0  # a pass in training mode then normalizes by the batch and stores nothing
            for owner in ("source", "stream"):
                self.register_buffer(f"{owner}_mean_{index}", _buffer(layer, "running_mean").float().clone())
                self.register_buffer(
                    f"{owner}_variance_{index}", _buffer(layer, "running_var").float().clone()
                )

    def begin(self) -> None:
        """Forget the step before, finished or not."""
        self._before = {}

    @property
    def observed(self) -> bool:
        """Whether the moments from before this step's updates are known, or will not be needed."""
        follows = self.config.follow_updates and self.config.kind in ("stream", "blend")
        return bool(self._before) or not self._layers or not follows

    def one_pass(self, images: int) -> bool:
        """Say whether updates and predictions of such a batch run on the same statistics."""
        return (
            not self._layers or self.config.kind == "source" or (self.config.kind == "batch" and images > 1)
        )

    @property
    def per_batch(self) -> bool:
        """Whether each batch is predicted on statistics of its own, at least in part."""
        return bool(self._layers) and self.config.kind in ("batch", "blend")

    @contextmanager
    def updating(self, images: int) -> Iterator[None]:
        """Set the mode of a pass whose gradient is taken; the first one of a step is observed."""
        mode = self.config.kind != "source" and images > 1
        wanted = self._averages(images) and self.config.follow_updates and not self._before
        with self._pass(mode, observe=wanted) as moments:
            yield
        if wanted:
            self._before = moments

    @contextmanager
    def predicting(self, images: int) -> Iterator[None]:
        """Set the mode of the pass that predicts."""
        with self._pass(self.config.kind == "batch" and images > 1, observe=False):
            yield

    @torch.no_grad()
    def settle(self, model: nn.Module, x: Tensor) -> None:
        """Take the batch into the average under the current weights and make it what predictions run on."""
        images = len(x)
        if not self._averages(images):
            return
        with self._pass(images > 1, observe=True) as moments:
            model(x)
        weight = stream_weight(images, self.seen, self.config.source_images, self.config.floor)
        for index, batch in moments.items():
            self._run_on(index, self._average(index, batch, images, weight))
        if self.config.kind != "blend" or images == 1:  # a blend stores nothing
            self.seen += images

    @torch.no_grad()
    def observe(self, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits on the batch's statistics and how far these are from the source's, (layers,).

        Layers come in the order they run; each sees what those before it have normalized by the batch.
        """
        with self._pass(True, observe=True) as moments:
            logits = model(x)
        shifts = [moment_shift(self._stored("source", index), batch) for index, batch in moments.items()]
        return logits, torch.stack(shifts)

    @torch.no_grad()
    def freeze(self, model: nn.Module, x: Tensor) -> None:
        """Make what a prediction of x runs on what every later pass in evaluation mode runs on."""
        if self.config.kind == "batch" and len(x) > 1:
            with self._pass(True, observe=True) as moments:
                model(x)
            for index, batch in moments.items():
                self._run_on(index, batch)
        else:
            self.settle(model, x)

    def _run_on(self, index: int, moments: Moments) -> None:
        _buffer(self._layers[index], "running_mean").copy_(moments.mean)
        _buffer(self._layers[index], "running_var").copy_(moments.variance)

    def _averages(self, images: int) -> bool:
        """Say whether this batch is predicted on an average: asked for, or the only way with one image."""
        kind = self.config.kind
        return bool(self._layers) and (kind in ("blend", "stream") or (kind == "batch" and images == 1))

    def _average(self, index: int, batch: Moments, images: int, weight: Tensor) -> Moments:
        """Return what layer `index` predicts on, and store the stream's moments."""
        config = self.config
        if config.kind == "blend" and images > 1:
            return mix(self._stored("source", index), batch, blend_weight(images, config.source_images))
        stream = self._stored("stream", index)
        if index in self._before:
            stream = transport(stream, self._before[index], batch)
        stream = mix(stream, batch, weight)
        self.get_buffer(f"stream_mean_{index}").copy_(stream.mean)
        self.get_buffer(f"stream_variance_{index}").copy_(stream.variance)
        return stream

    def _stored(self, owner: str, index: int) -> Moments:
        return Moments(self.get_buffer(f"{owner}_mean_{index}"), self.get_buffer(f"{owner}_variance_{index}"))

    @contextmanager
    def _pass(self, on_batch: bool, observe: bool) -> Iterator[dict[int, Moments]]:
        """Run a pass on the batch's statistics or on the running ones; collect the layers' input moments."""
        moments: dict[int, Moments] = {}
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                layer.train(on_batch)
                stack.callback(layer.eval)
                if observe:
                    stack.callback(layer.register_forward_pre_hook(_collector(moments, index)).remove)
            yield moments


def _collector(moments: dict[int, Moments], index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def collect(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        moments[index] = moments_of(inputs[0])

    return collect


def _buffer(layer: nn.Module, name: str) -> Tensor:
    return layer.get_buffer(name)
