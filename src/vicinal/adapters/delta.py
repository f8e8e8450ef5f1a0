"""DELTA: batch renormalization on averages over the stream, and entropy balanced over classes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vicinal.adapters.contract import Adapter
from vicinal.adapters.layers import Lent, batch_norms, renormalized, running, running_moments
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import optimizer_for, take_step, update_and_predict
from vicinal.adapters.settings import Parameters, Predict, Settings
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.checkpoint import Trained
from vicinal.errors import ConfigError
from vicinal.functional.losses import entropies
from vicinal.functional.normalization import Moments, mix, moments_of
from vicinal.functional.peers_entropy import balance_weights


@dataclass(frozen=True)
class DeltaSettings(Settings):
    """What `delta` can be told besides what every method can."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("stream"))
    predict: Predict = "before"
    lr: float = 1e-3  # with Adam, as `tent` here; the released configurations have SGD 2.5e-4
    parameters: Parameters = "norm"
    renormalize: bool = True  # stream statistics are the paper's (TBR); False: those of every method here
    smoothing: float = 0.95  # what the average of statistics keeps of itself a batch; alpha of the paper
    balance: float = 0.95  # what the class frequency keeps of itself an update; lambda of the paper

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.smoothing < 1 or not 0 <= self.balance <= 1:
            raise ConfigError(
                "delta needs smoothing of at least 0 and below 1 and balance of at least 0 and at most 1"
            )


TRAITS = Traits(
    paper="Zhao et al. 2023",
    updates="scale and shift of normalization layers",
    batch_of_one="predicted, and updated, on the average over the stream",
    norms="any; renormalization is for BatchNorm; a net without any needs parameters='all'",
    passes="1 forward, 1 backward",
)


@register("delta", DeltaSettings(), TRAITS)
class Delta(Adapter):
    """Entropy weighted by one over a running class frequency, on renormalized stream statistics.

    Zhao, Chen, Xia, "DELTA: degradation-free fully test-time adaptation", ICLR 2023.

    Loss (DOT): L = (1/N) sum_i w_i H(p_i), w_i proportional to 1 / q[argmax_c p[i, c]] with mean 1. The class
    frequency q starts even and follows after each update: q <- 0.95 q + 0.05 mean_i p_i.
    Statistics (TBR): a BatchNorm layer puts out scale * (x_b * r + d) + shift, x_b the input normalized by
    the batch, r = s_b / s, d = (m_b - m) / s, with m and s averages over the stream of the batches' means and
    standard deviations; r and d are constants to the gradient. Values are those of stream statistics, the
    gradient is the batch's. The averages start as the first batch's and take each batch in after its first
    pass: m <- 0.95 m + 0.05 m_b.
    Updated: scale and shift of every normalization layer.
    Prediction: before the last update of the batch, from the pass whose gradient is taken.
    Defaults: 0.95 and 0.95, the authors' configurations. r and d are not clipped, as in their code.

    TBR is what `statistics="stream"` means here; other kinds, or `renormalize=False`, run DOT alone.

    Departs: Adam, lr 1e-3, as `tent`, so that the two differ by DELTA alone; the released configurations, of
    ImageNet-C at batches of 64, have SGD 2.5e-4 with momentum 0.9 for both. A batch of one has no statistics:
    it runs on the averages (the source's, before any batch), without the batch's gradient, and joins their
    variance by its distance from the mean; the code divides by its own. The code knows BatchNorm alone; here
    GroupNorm and LayerNorm are updated as well.
    """

    predicts = ("own", "before")
    settings: DeltaSettings

    def prepare(self, source: Trained) -> None:
        """Set up the optimizer and the averages."""
        self.optimizer = optimizer_for(self)
        self.renormalizes = self.settings.renormalize and self.settings.statistics.kind == "stream"
        if self.renormalizes:
            self.renorm = Renormalization(self.model, self.settings.smoothing)

    def adapt(self, x: Tensor) -> Tensor:
        """Lower the balanced entropy; predict before the last update, or after it."""
        if not self.renormalizes:
            return update_and_predict(self, x, lambda z, logits: self._loss(logits))
        return self._adapt_renormalized(x)

    def _adapt_renormalized(self, x: Tensor) -> Tensor:
        before, augment = self.settings.predict == "before", self.settings.augment
        self.renorm.begin()
        logits = x
        for _ in range(self.settings.steps):
            if augment is not None:  # statistics and predictions are the clean view's
                logits = self._look(x)
            with self.renorm.applied(len(x)):
                seen = self.model(x if augment is None else augment(x, self.generator))
            self._update(self._loss(seen))
            self.renorm.join()
            logits = seen.detach() if augment is None else logits
        return logits if before else self._look(x)

    @torch.no_grad()
    def _look(self, x: Tensor) -> Tensor:
        with self.renorm.applied(len(x)):
            z, logits = self.model.features_and_logits(x)
        self.renorm.join()
        self.show(z, logits, self.model)
        return logits

    def _update(self, loss: Tensor) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        take_step(self)

    def _loss(self, logits: Tensor) -> Tensor:
        """Return the balanced entropy, and let the class frequency follow."""
        p = logits.detach().softmax(-1)
        even = torch.full_like(p[0], 1 / p.shape[1])
        frequency = self.memory.get("frequency", even)
        self.memory["frequency"] = frequency.lerp(p.mean(0), 1 - self.settings.balance)
        return (balance_weights(p, frequency) * entropies(logits)).mean()


class Averages(NamedTuple):
    """Mean and standard deviation, with the layer's epsilon, of every channel of a layer's input."""

    mean: Tensor
    deviation: Tensor


class Renormalization(nn.Module):
    """Batch renormalization of a model's BatchNorm layers: stream averages in value, the batch in gradient.

    The layers' own running buffers hold the averages as well, so that a pass in evaluation mode runs on them.
    """

    batches: Tensor

    def __init__(self, model: nn.Module, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing
        self._pending: dict[int, Averages] | None = None  # None: the batch is in already
        # In a tuple, so that the layers stay the model's and are not registered a second time.
        self._layers = tuple(batch_norms(model))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        for index, layer in enumerate(self._layers):
            mean, variance = running_moments(layer)
            self.register_buffer(f"mean_{index}", mean.clone())
            self.register_buffer(f"deviation_{index}", (variance + layer.eps).sqrt())

    def begin(self) -> None:
        """Expect a new batch: its first pass is what joins the averages."""
        self._pending = {}

    @contextmanager
    def applied(self, images: int) -> Iterator[None]:
        """Set up a pass on the averages, with the gradient of batch statistics."""
        averages: dict[int, Averages] = {}

        def values(index: int, x: Tensor) -> Lent:
            layer = self._layers[index]
            batch = _averages_of(layer, x)
            if images == 1:
                averages[index] = self._with_one(index, batch)
                return {}
            base = self._base(index, batch)
            averages[index] = Averages(
                *(a.lerp(b, 1 - self.smoothing) for a, b in zip(base, batch, strict=True))
            )
            d = (batch.mean - base.mean) / base.deviation
            return renormalized(layer, batch.deviation / base.deviation, d)

        with running(self._layers, values, on_batch=images > 1):
            yield
        if self._pending == {}:
            self._pending = averages

    def _with_one(self, index: int, single: Averages) -> Averages:
        """Return the averages with a single image in them, which itself runs on those from before it."""
        old, new = (Moments(mean, s.square()) for mean, s in (self._stored(index), single))
        mean, variance = mix(old, new, 1 - self.smoothing)
        return Averages(mean, variance.sqrt())

    def _stored(self, index: int) -> Averages:
        return Averages(self.get_buffer(f"mean_{index}"), self.get_buffer(f"deviation_{index}"))

    def _base(self, index: int, batch: Averages) -> Averages:
        """Return what a batch is normalized to: the averages or, for the first batch, its own moments."""
        first, stored = self.batches == 0, self._stored(index)
        return Averages(*(torch.where(first, new, old) for new, old in zip(batch, stored, strict=True)))

    @torch.no_grad()
    def join(self) -> None:
        """Take the batch into the averages, once; after the backward pass, whose graph may hold buffers."""
        if self._pending is None:
            return
        for index, (mean, deviation) in self._pending.items():
            layer = self._layers[index]
            variance = (deviation.square() - layer.eps).clamp_min(0)
            places = [*self._stored(index), *running_moments(layer)]
            torch._foreach_copy_(places, [mean, deviation, mean, variance])
        self.batches += 1
        self._pending = None


def _averages_of(layer: _BatchNorm, x: Tensor) -> Averages:
    """Return mean and standard deviation of every channel, cut off from the graph."""
    mean, variance = moments_of(x)
    return Averages(mean, (variance + layer.eps).sqrt())
