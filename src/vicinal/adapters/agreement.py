"""How sure a stream's predictions may be: by how often a frozen model says something else."""

import torch
from torch import Tensor, nn

from vicinal.adapters.ring import next_places, taken
from vicinal.functional.calibration import expected_errors, matched_temperature, unsureness


class Agreement(nn.Module):
    """The last predictions of one stream, and on which of them a frozen model differed."""

    logs: Tensor
    differs: Tensor
    count: Tensor  # predictions so far; the next one takes the place of the oldest
    temperature: Tensor  # of the last batch

    def __init__(self, window: int, like: Tensor) -> None:
        """Keep so many predictions, over as many classes as `like` (C,) has."""
        super().__init__()
        self.register_buffer("logs", torch.zeros_like(like).repeat(window, 1))
        self.register_buffer("differs", like.new_zeros(window))
        self.register_buffer("count", torch.zeros((), dtype=torch.long, device=like.device))
        self.register_buffer("temperature", like.new_ones(()))

    @torch.no_grad()
    def forward(self, logits: Tensor, says: Tensor, kappa: float, prior: float) -> Tensor:
        """Return T for a batch's logits (N, C), which joins; says: the classes by the frozen model (N,).

        By it the last predictions are as unsure as they are likely to be wrong, see `expected_errors`.
        """
        self._keep(logits.detach(), says)
        # A batch that broke down tells nothing of the others.
        known = taken(self.count, len(self.logs)) & self.logs.isfinite().all(-1)
        unsure = unsureness(self.logs, known)
        e = expected_errors((self.differs * known).sum(), known.sum(), unsure, kappa, prior)
        self.temperature.copy_(matched_temperature(self.logs, known, e))
        return self.temperature

    def _keep(self, logits: Tensor, says: Tensor) -> None:
        """Remember a batch, the oldest predictions giving way; of one that is too large, its last ones."""
        window = len(self.logs)
        places = next_places(self.count, window, len(logits))
        differs = (logits.argmax(-1) != says).to(self.differs)
        self.logs.index_copy_(0, places, logits.to(self.logs)[-window:])
        self.differs.index_copy_(0, places, differs[-window:])
        self.count += len(logits)
