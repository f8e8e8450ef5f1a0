"""The neighborhood of a stream's samples: it labels batches by those seen last, and remembers them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.adapters.ring import next_places, taken
from vicinal.functional.neighbors import voted_labels
from vicinal.types import Crowd, Head


class Neighborhood(nn.Module):
    """The last samples of one stream, with their labels, in tensors that stay where they are."""

    z: Tensor
    y: Tensor
    count: Tensor  # samples so far; the next one takes the place of the oldest

    def __init__(self, size: int, head: Head, spaces: int = 1) -> None:
        """Make room for so many samples, each with its features in one space or side by side in several."""
        super().__init__()
        self.register_buffer("z", torch.zeros_like(head.weight[:1]).repeat(size, spaces))
        self.register_buffer("y", torch.zeros_like(head.bias).repeat(size, 1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long, device=head.bias.device))

    @property
    def crowd(self) -> Crowd:
        """Who may vote."""
        return Crowd(self.z, self.y, taken(self.count, len(self.z)))

    @torch.no_grad()
    def forward(self, z: Tensor, y: Tensor, k: int, tau: float, share: float, rounds: int = 1) -> Tensor:
        """Return y_hat (N, C), labels by votes of the nearest neighbors in so many rounds: `voted_labels`.

        A model whose features cannot be had has no neighbors: its own labels stand.
        """
        if z.shape[-1] == 0:
            return y
        return voted_labels(z.to(self.z), y.to(self.y), self.crowd, k, tau, share, rounds)

    @torch.no_grad()
    def keep(self, z: Tensor, y: Tensor) -> None:
        """Remember a batch, the oldest samples giving way; of one that is too large, its last samples."""
        if z.shape[-1] == 0:
            return
        size = len(self.z)
        places = next_places(self.count, size, len(z))
        self.z.index_copy_(0, places, F.normalize(z[-size:], dim=-1).to(self.z))
        self.y.index_copy_(0, places, y[-size:].to(self.y))
        self.count += len(z)
