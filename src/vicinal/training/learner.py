"""What training changes: the nets, their optimizer and the random generators. Only the loop steps it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vicinal.data.episodes import Batch, Drawing
from vicinal.functional.schedule import one_cycle
from vicinal.models.classifier import Classifier
from vicinal.models.inference import InferenceNet
from vicinal.registry import Registry
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

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device


Step = Callable[[Learner, tuple[Batch, ...]], Terms]


@dataclass(frozen=True)
class Stage:
    """One part of an algorithm: batches drawn and a step on them, repeated; it trains all or phi alone."""

    name: str
    drawing: Drawing
    step: Step
    uses_phi: bool = False
    fixed_model: bool = False


ALGORITHMS: Registry[tuple[Stage, ...]] = Registry("algorithm")


def make_learner(
    model: Classifier, phi: InferenceNet | None, stage: Stage, config: TrainConfig, seed: int
) -> Learner:
    """Return a learner at the start of a stage: Adam with a step size for each part."""
    groups = []
    if not stage.fixed_model:
        groups += [
            {"params": list(model.features.parameters()), "lr": config.backbone_lr},
            {"params": list(model.head.parameters()), "lr": config.head_lr},
        ]
    if stage.uses_phi and phi is not None:
        groups.append({"params": list(phi.parameters()), "lr": config.phi_lr})
    for group in groups:
        group["peak"] = group["lr"]
    device = next(model.parameters()).device
    return Learner(
        model,
        phi if stage.uses_phi else None,
        torch.optim.Adam(groups),
        config,
        torch.Generator().manual_seed(seed),
        torch.Generator(device=device).manual_seed(seed),
    )


def set_rate(learner: Learner, progress: float) -> None:
    """Set every step size to its place in the one-cycle schedule."""
    for group in learner.optimizer.param_groups:
        group["lr"] = group["peak"] * one_cycle(progress)
