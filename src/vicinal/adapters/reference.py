"""The source model as a second opinion, on the statistics that suit the batch better."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vicinal.adapters.contract import Adapter
from vicinal.adapters.passes import as_logits
from vicinal.adapters.statistics import NormStatistics, StatisticsConfig
from vicinal.functional.trust import information, mean_entropy
from vicinal.models.wrap import copied


class Opinion(NamedTuple):
    """What the source model says of a batch."""

    logits: Tensor
    p: Tensor


class Reference:
    """The source model beside an adapter. Its weights are those the adapter keeps for `reset`: no copy."""

    def __init__(self, adapter: Adapter, margin: float, shift: float, told: float, more: float) -> None:
        self.margin = margin  # mean entropies closer than this, in units of log C, count as equal
        self.shift = shift  # of the first layer's statistics, that counts as one
        self.told = told  # information that predictions on mended statistics have at least
        self.more = more  # or this many times what those on the source's have, and `told / more`
        source, initial = adapter.source.model, adapter.initial_state
        shared: dict[int, object] = {}
        for name, value in source.named_parameters():
            kept = initial.get(f"model.{name}")
            if kept is not None and kept.shape == value.shape:
                shared[id(value)] = nn.Parameter(kept, requires_grad=False)
        for name, buffer in source.named_buffers():
            kept = initial.get(f"model.{name}")
            if kept is not None and kept.shape == buffer.shape:
                shared[id(buffer)] = kept.clone()
        dtype = next(adapter.model.parameters()).dtype
        self.model = copied(source, shared).to(dtype).eval().requires_grad_(False)
        self.norm = NormStatistics(self.model, StatisticsConfig("batch", follow_updates=False))
        self.has_statistics = not self.norm.one_pass(1)

    def parameters(self) -> dict[str, Tensor]:
        """Return the source's parameters by name."""
        return dict(self.model.named_parameters())

    @torch.no_grad()
    def on_source(self, x: Tensor) -> Opinion:
        """Return what the source model says on its own statistics."""
        return _opinion(self.model(x))

    @torch.no_grad()
    def consensus(self, x: Tensor, own: Opinion | None = None) -> Opinion:
        """Return the opinion on source statistics, that on the batch's, or their mean where both are certain.

        Where the first layer's statistics are far from the source's, the last layer's are not, once those
        before it are mended, and images are told apart, the shift is one that statistics mend: the batch's
        count. In little light they tell little apart, but on the source's nothing is. Batches of few classes
        shift the last layer alone, noise shifts all. Else certainty decides: that of a model which nothing
        has trained on the target follows its accuracy, that of an adapted one does not.
        """
        own = own or self.on_source(x)
        if not self.has_statistics or len(x) == 1:
            return own
        logits, shifts = self.norm.observe(self.model, x)
        other = _opinion(logits)
        lead = mean_entropy(own.p) - mean_entropy(other.p)
        signs = [lead, information(own.p), information(other.p), *shifts[[0, -1]].to(lead)]
        lead, before, told, first, last = torch.stack(signs).tolist()
        tells = told > self.told or told > max(self.more * before, self.told / self.more)
        if first > self.shift and last < first / 2 and tells:
            return other
        if abs(lead) > self.margin:
            return other if lead > 0 else own
        p = (own.p + other.p) / 2
        return Opinion(as_logits(p), p)


def _opinion(logits: Tensor) -> Opinion:
    return Opinion(logits, logits.softmax(-1))
