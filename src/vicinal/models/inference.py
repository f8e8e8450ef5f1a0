"""phi: from what is known of each class in the target to a Gaussian over its classifier row.

Two nets answer the same question. `InferenceNet` is the paper's, fed with class-mean features. The other,
`StreamInferenceNet`, is fed with a few scale-free numbers a class and a memory of the stream, so that one
fitted net serves models it was never fitted on.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from vicinal.functional.labels import linear_logits
from vicinal.functional.memory import (
    EVIDENCE,
    Rows,
    batch_memory,
    centres,
    evidence,
    remember,
    source_rows,
)
from vicinal.types import GaussianW, Head, StreamMemory


class InferenceNet(nn.Module):
    """The paper's phi: class-mean feature -> mean and standard deviation of one classifier row.

    `layers` counts linear maps, the two heads among them: with the paper's 3 its parameters are the paper's,
    with 2 the heads read the class mean itself.
    """

    def __init__(
        self, num_features: int, hidden: int = 512, initial_std: float | None = None, layers: int = 3
    ) -> None:
        super().__init__()
        # Departs from the paper: a spread that starts small. The noise of a logit is std times the norm of z;
        # 5e-3 at d = 2048 keeps it to a fraction of a logit, at 0.08 labels are mush.
        std = 5e-3 * math.sqrt(2048 / num_features) if initial_std is None else initial_std
        self.shape = {"num_features": num_features, "hidden": hidden, "initial_std": std, "layers": layers}
        widths = [num_features, *[hidden] * (layers - 2)]
        steps = [(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(widths)]
        self.trunk = nn.Sequential(*(part for step in steps for part in step))
        self.mean = nn.Linear(widths[-1], num_features)
        self.log_std = nn.Linear(widths[-1], num_features)
        # Departs from the paper: the mean head emits a correction of the source row, zero at the start. A
        # free row needs long training and wrecks the labels until then.
        nn.init.zeros_(self.mean.weight)
        nn.init.zeros_(self.mean.bias)
        nn.init.zeros_(self.log_std.weight)
        nn.init.constant_(self.log_std.bias, math.log(std))

    def forward(self, class_means: Tensor, head: Head, present: Tensor) -> GaussianW:
        """Return w from class means (..., C, d); an absent class keeps its source row.

        Departs from the paper, which fills absent classes with the batch mean: every such row then attracts
        every sample.
        """
        hidden = self.trunk(class_means)
        correction = torch.where(present.unsqueeze(-1), self.mean(hidden), torch.zeros_like(class_means))
        mean = head.weight + correction
        return GaussianW(mean, self.log_std(hidden).exp(), head.bias.expand(mean.shape[:-1]))


class StreamInferenceNet(nn.Module):
    """The out-of-fold phi: evidence a class -> how far its row moves toward the class mean of the stream."""

    location: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self, hidden: int = 32, rounds: int = 2, decay: float = 0.9, reference_batch: int = 20
    ) -> None:
        super().__init__()
        self.shape = {"hidden": hidden, "rounds": rounds, "decay": decay, "reference_batch": reference_batch}
        self.rounds, self.decay, self.reference_batch = rounds, decay, reference_batch
        width = len(EVIDENCE)
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.log_temperature = nn.Parameter(torch.zeros(()))
        self.marginal_weight = nn.Parameter(torch.zeros(()))
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        with torch.no_grad():
            last.bias.copy_(torch.tensor([0.0, 0.0, -3.0]))
        self.register_buffer("location", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("low", torch.full((width,), -math.inf))
        self.register_buffer("high", torch.full((width,), math.inf))

    def packed(self) -> Tensor:
        """Return all numbers of the net in one row, in the order in which a kernel takes them."""
        first, _, last = self.net
        parts = [self.location, self.scale, self.low, self.high, *first.parameters(), *last.parameters()]
        return torch.cat([part.flatten() for part in (*parts, self.log_temperature, self.marginal_weight)])

    def infer(self, memory: StreamMemory, head: Head) -> GaussianW:
        """Return w from a memory that already holds the batch.

        w_c = (W_c + a_c r u_c) / T, u_c the centred class mean over the average norm of such means, r the
        average norm of the source rows; b_c = (b_c + beta_c + gamma log marginal_c - a_c r u_c' m) / T, m the
        mean of the stream, so that a row is moved for centred features. The spread is s_c r / sqrt(d) in
        every direction.
        """
        return self._infer(memory, head, source_rows(head))

    def _infer(self, memory: StreamMemory, head: Head, rows: Rows) -> GaussianW:
        at = centres(memory)
        numbers = (evidence(memory, at, rows) - self.location) / self.scale
        step, beta, log_spread = self.net(numbers).unbind(-1)
        length = rows.size.unsqueeze(-1)
        moved = (step * (length / at.norms.mean(-1, keepdim=True).clamp_min(1e-6))).unsqueeze(-1) * at.centred
        cool = self.log_temperature.neg().exp()
        prior = self.marginal_weight * (memory.marginal + 1e-3).log()
        bias = head.bias + beta + prior - (moved * at.total).sum(-1)
        spread = log_spread.exp() * (length * (cool / math.sqrt(moved.shape[-1])))
        return GaussianW((head.weight + moved) * cool, spread.unsqueeze(-1).expand_as(moved), bias * cool)

    def trust(self, memory: StreamMemory, head: Head) -> Tensor:
        """Return how far each class can be trusted (..., C): 1 inside the range phi was fitted on.

        exp(-e), e the excess over the fitted range in standard deviations of the fitted evidence, summed over
        the numbers: outside what it has seen, phi is guessing.
        """
        numbers = evidence(memory, centres(memory), source_rows(head))
        below, above = (self.low - numbers).clamp_min(0), (numbers - self.high).clamp_min(0)
        return torch.exp(-((below + above) / self.scale).sum(-1))

    def step_memory(self, memory: StreamMemory, z: Tensor, y: Tensor) -> StreamMemory:
        """Return the memory after a batch with labels y; decay is by images, so batch sizes may vary."""
        return remember(memory, batch_memory(z, y), self.decay_of(z.shape[-2]))

    def decay_of(self, images: int) -> float:
        """Return the part of the memory that stays when so many images arrive."""
        return math.pow(self.decay, images / self.reference_batch)

    def forward(
        self, z: Tensor, logits: Tensor, head: Head, memory: StreamMemory
    ) -> tuple[GaussianW, StreamMemory]:
        """Return w for a batch and the memory that holds it: rounds of label-then-mean."""
        y, rows = logits.softmax(-1), source_rows(head)
        for _ in range(self.rounds):
            w = self._infer(self.step_memory(memory, z, y), head, rows)
            y = linear_logits(z, w.mean, w.bias).softmax(-1)
        return w, self.step_memory(memory, z, y)
