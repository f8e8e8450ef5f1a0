"""An out-of-fold phi at work on a stream: it labels batches and remembers them."""

import copy

import torch
from torch import Tensor, nn

from vicinal.adapters.reading import read
from vicinal.functional.labels import drawn_labels, neighbor_labels, noise_like
from vicinal.functional.memory import empty_memory
from vicinal.graphs import Branch
from vicinal.models.inference import StreamInferenceNet
from vicinal.types import Head, StreamMemory


class StreamLabeler(nn.Module):
    """Labels the batches of one stream with phi, keeping the memory phi reads."""

    def __init__(self, phi: StreamInferenceNet, head: Head) -> None:
        super().__init__()
        self.phi = copy.deepcopy(phi).requires_grad_(False)
        self.draws: Tensor | None = None  # the last labels, draw by draw (S, N, C)
        for name, value in empty_memory(head)._asdict().items():
            self.register_buffer(name, value.clone())

    @property
    def memory(self) -> StreamMemory:
        """The stream as seen so far."""
        return StreamMemory(*(self.get_buffer(name) for name in StreamMemory._fields))

    @torch.no_grad()
    def forward(
        self, z: Tensor, logits: Tensor, head: Head, num_samples: int, generator: torch.Generator
    ) -> Tensor:
        """Return y_hat (N, C) and remember the batch.

        y_hat = t y_w + (1 - t) y_own, y_w what draws of w say and t the trust in it: the part of its mass
        that lies on classes whose evidence is inside the range phi was fitted on.
        """
        with Branch(z.device) as beside:  # what needs no w
            own = logits.softmax(-1)
            noise = noise_like(head.weight, num_samples, generator) if num_samples else None
        w, memory, trusted = read(self.phi, z.contiguous(), logits.contiguous(), head, self.memory)
        beside.join()
        with Branch(z.device) as remembering:
            torch._foreach_copy_(list(self.memory), list(memory))
        draws = None if noise is None else drawn_labels(z, w, noise)
        y_w = neighbor_labels(z, w, 0) if draws is None else draws.mean(0)
        trust = (y_w * trusted).sum(-1, keepdim=True)
        self.draws = None if draws is None else torch.lerp(own.expand_as(draws), draws, trust)
        remembering.join()
        return torch.lerp(own, y_w, trust)
