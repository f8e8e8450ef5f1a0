"""The source model as a second opinion, on the statistics that suit the batch better."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vicinal.adapters.contract import Adapter
from vicinal.adapters.statistics import NormStatistics, StatisticsConfig
from vicinal.functional.trust import mean_entropy


class Opinion(NamedTuple):
    """What the source model says of a batch."""

    logits: Tensor
    p: Tensor
    on_batch: bool = False  # whether it ran on the batch's normalization statistics


class Reference:
    """The source model beside an adapter. Its weights are those the adapter keeps for `reset`: no copy."""

    def __init__(self, adapter: Adapter) -> None:
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
    def safer(self, x: Tensor, own: Opinion | None = None) -> Opinion:
        """Return the opinion on source statistics or on the batch's, whichever is more certain of itself.

        Under a shift that statistics can mend the batch's are the more certain; in a batch of few classes, or
        of noise, they are the less certain. Certainty of models that nothing has trained on the target
        follows accuracy, that of adapted ones does not.
        """
        own = own or self.on_source(x)
        if not self.has_statistics or len(x) == 1:
            return own
        with self.norm.updating(len(x)):
            other = _opinion(self.model(x), on_batch=True)
        return other if bool(mean_entropy(other.p) < mean_entropy(own.p)) else own


def _opinion(logits: Tensor, on_batch: bool = False) -> Opinion:
    return Opinion(logits, logits.softmax(-1), on_batch)
