"""What training changes: the nets, their optimizer and the random generators. Only the loop steps it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from vicinal.data.domains import SourceDomain
from vicinal.data.episodes import Batch, Drawing
from vicinal.functional.schedule import one_cycle
from vicinal.graphs import adam_options
from vicinal.models.classifier import Classifier
from vicinal.models.inference import InferenceNet
from vicinal.models.pooling import fuse_pools
from vicinal.registry import Registry
from vicinal.training.average import average_of
from vicinal.training.config import TrainConfig

Terms = Mapping[str, Tensor]


@dataclass
class Learner:
    """A model in training. `draws` picks domains, images and crops; `noise` feeds the samples of w."""

    model: Classifier
    phi: InferenceNet | None
    optimizer: torch.optim.Optimizer
    config: TrainConfig
    draws: torch.Generator
    noise: torch.Generator
    auxiliary: nn.Module | None = None  # what an algorithm trains besides model and phi
    average: AveragedModel | None = None  # of the weights so far, where these are averaged
    seconds: float = 0.0  # in the loop so far, before an interruption too

    @property
    def parts(self) -> dict[str, nn.Module]:
        """The nets that are there, by name."""
        parts = {"model": self.model, "phi": self.phi, "auxiliary": self.auxiliary}
        return {name: module for name, module in parts.items() if module is not None}

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device


Step = Callable[[Learner, tuple[Batch, ...]], Terms]
Auxiliary = Callable[[Classifier, TrainConfig], nn.Module]
Finish = Callable[[Learner, Sequence[SourceDomain]], dict[str, Tensor]]


@dataclass(frozen=True)
class Stage:
    """One part of an algorithm: batches drawn and a step on them, repeated; it trains all or phi alone."""

    name: str
    drawing: Drawing
    step: Step
    uses_phi: bool = False
    fixed_model: bool = False
    auxiliary: Auxiliary | None = None  # makes what the stage trains besides model and phi
    auxiliary_rate: Literal["head_lr", "phi_lr"] = "head_lr"  # whose step size it takes
    finish: Finish | None = None  # says what of the trained nets and the sources goes into Trained.extras


ALGORITHMS: Registry[tuple[Stage, ...]] = Registry("algorithm")


def make_learner(
    model: Classifier, phi: InferenceNet | None, stage: Stage, config: TrainConfig, seed: int
) -> Learner:
    """Return a learner at the start of a stage: Adam with a step size for each part."""
    groups, device = [], next(model.parameters()).device
    if not stage.fixed_model:
        if device.type == "cuda":
            fuse_pools(model)
        groups += [
            {"params": list(model.features.parameters()), "lr": config.backbone_lr},
            {"params": list(model.head.parameters()), "lr": config.head_lr},
        ]
    if stage.uses_phi and phi is not None:
        groups.append({"params": list(phi.parameters()), "lr": config.phi_lr})
    auxiliary = None
    if stage.auxiliary is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            auxiliary = stage.auxiliary(model, config).to(device)
        groups.append({"params": list(auxiliary.parameters()), "lr": getattr(config, stage.auxiliary_rate)})
    for group in groups:
        group["peak"] = group["lr"]
        if device.type == "cuda":  # where a recorded step reads it
            group["lr"] = torch.tensor(group["lr"], device=device)
    learner = Learner(
        model,
        phi if stage.uses_phi else None,
        torch.optim.Adam(groups, **adam_options(device)),
        config,
        torch.Generator().manual_seed(seed),
        torch.Generator(device=device).manual_seed(seed),
        auxiliary,
    )
    if config.average and not stage.fixed_model:
        learner.average = average_of(learner.parts)
    return learner


def set_rate(learner: Learner, progress: float) -> None:
    """Set every step size to its place in the one-cycle schedule."""
    for group in learner.optimizer.param_groups:
        rate = group["peak"] * one_cycle(progress)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
