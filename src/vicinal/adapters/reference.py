"""The source model as a second opinion, on the statistics that suit the batch better."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vicinal.adapters.contract import Adapter
from vicinal.adapters.passes import as_logits
from vicinal.adapters.statistics import NormStatistics, StatisticsConfig
from vicinal.functional.trust import mean_entropy


class Opinion(NamedTuple):
    """What the source model says of a batch."""

    logits: Tensor
    p: Tensor


class Reference:
    """The source model beside an adapter. Its weights are those the adapter keeps for `reset`: no copy."""

    def __init__(self, adapter: Adapter, margin: float) -> None:
        self.margin = margin  # mean entropies closer than this, in units of log C, count as equal
        source, initial = adapter.source.model, adapter.initial_state
        shared: dict[int, object] = {}
        for name, value in source.named_parameters():
            kept = initial.get(f"model.{name}")
            if kept is not None and kept.shape == value.shape:
                shared[id(value)] = nn.Parameter(kept, requires_grad=False)
        for name, value in source.named_buffers():
            kept = initial.get(f"model.{name}")
            if kept is not None and kept.shape == value.shape:
                shared[id(value)] = kept.clone()
        dtype = next(adapter.model.parameters()).dtype
        self.model = copy.deepcopy(source, shared).to(dtype).eval().requires_grad_(False)
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

        Under a shift that statistics can mend the batch's are the more certain; in a batch of few classes, or
        of noise, they are the less certain. Certainty of models that nothing has trained on the target
        follows accuracy, that of adapted ones does not.
        """
        own = own or self.on_source(x)
        if not self.has_statistics or len(x) == 1:
            return own
        with self.norm.updating(len(x)):
            other = _opinion(self.model(x))
        lead = float(mean_entropy(own.p) - mean_entropy(other.p))
        if abs(lead) > self.margin:
            return other if lead > 0 else own
        p = (own.p + other.p) / 2
        return Opinion(as_logits(p), p)


def _opinion(logits: Tensor) -> Opinion:
    return Opinion(logits, logits.softmax(-1))
