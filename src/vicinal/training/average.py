"""Weights averaged over the end of training: one model of many, in a flatter minimum than any of theirs.

After Izmailov et al. (2018), and for domains never seen Cha et al. (2021). What BatchNorm layers have seen of
other weights means nothing to the average: their statistics are estimated anew.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from vicinal.data.domains import SourceDomain
from vicinal.data.transforms import to_float
from vicinal.training.config import TrainConfig

EVERY = 10  # iterations: weights of neighboring ones hardly differ
SETTLING = 4000  # images, at most, from which statistics are estimated


def averages(config: TrainConfig, iteration: int) -> bool:
    """Say whether the weights after this iteration go into the average."""
    last = iteration == config.iterations
    return last or (iteration > (1 - config.average) * config.iterations and iteration % EVERY == 0)


def average_of(parts: dict[str, nn.Module]) -> AveragedModel:
    """Return an average of these nets, with nothing in it yet."""
    return AveragedModel(nn.ModuleDict(parts))


def take_average(
    average: AveragedModel, parts: dict[str, nn.Module], sources: Sequence[SourceDomain], batch: int
) -> None:
    """Give nets their averaged weights, and the model among them the statistics that go with these."""
    own = nn.ModuleDict(parts)
    with torch.no_grad():
        for value, mean in zip(own.parameters(), average.module.parameters(), strict=True):
            value.copy_(mean)
    model = parts["model"]
    update_bn(_mixed(sources, batch, next(model.parameters()).device), model)
    model.eval()


def _mixed(sources: Sequence[SourceDomain], batch: int, device: torch.device) -> Iterator[Tensor]:
    """Yield batches of one size in which all domains have the same part: each counts the same."""
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(source.train), generator=generator) for source in sources]
    most = min(SETTLING // len(sources), *map(len, orders))
    each = max(1, min(most, batch // len(sources)))
    for start in range(0, most - each + 1, each):
        images = [
            s.train.images[order[start : start + each]] for s, order in zip(sources, orders, strict=True)
        ]
        yield torch.cat([to_float(part, device) for part in images])
