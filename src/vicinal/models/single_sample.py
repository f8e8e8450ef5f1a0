"""The net that generates a classifier from one image."""

import math

import torch
from torch import Tensor, nn

from vicinal.types import GaussianW, Head


class SampleInferenceNet(nn.Module):
    """One feature and the source rows -> mean and standard deviation of the rows of its own classifier.

    Feature z and row w_c are merged into what stands for class c in the image's domain; the same trunk that
    reads class means of a domain then reads it.
    """

    def __init__(
        self, num_features: int, hidden: int | None = None, initial_std: float | None = None
    ) -> None:
        super().__init__()
        hidden = num_features if hidden is None else hidden  # the authors' code
        # The first layer reads feature and row side by side: in two parts, N + C passes do for N x C pairs.
        self.read_feature = nn.Linear(num_features, hidden)
        self.read_row = nn.Linear(num_features, hidden, bias=False)
        self.merge = nn.Linear(hidden, num_features)
        self.trunk = nn.Linear(num_features, hidden)
        self.mean = nn.Linear(hidden, num_features)
        self.log_std = nn.Linear(hidden, num_features)
        # Departs from the paper, as `InferenceNet` does and for its reasons: a correction of the source row
        # that starts at zero, and a spread that starts small.
        std = 5e-3 * math.sqrt(2048 / num_features) if initial_std is None else initial_std
        nn.init.zeros_(self.mean.weight)
        nn.init.zeros_(self.mean.bias)
        nn.init.zeros_(self.log_std.weight)
        nn.init.constant_(self.log_std.bias, math.log(std))

    def forward(self, z: Tensor, head: Head) -> GaussianW:
        """Return the classifier (N, C, d) of each feature (N, d)."""
        pairs = self.read_feature(z).unsqueeze(-2) + self.read_row(head.weight)
        return self._generate(self.merge(torch.relu(pairs)), head)

    def of_domain(self, class_means: Tensor, present: Tensor, head: Head) -> GaussianW:
        """Return the classifier (C, d) of a domain with these class means; an absent class keeps its row."""
        w = self._generate(class_means, head)
        return w._replace(mean=torch.where(present.unsqueeze(-1), w.mean, head.weight))

    def _generate(self, classes: Tensor, head: Head) -> GaussianW:
        read = torch.relu(self.trunk(classes))
        mean = head.weight + self.mean(read)
        return GaussianW(mean, self.log_std(read).exp(), head.bias.expand(mean.shape[:-1]))
