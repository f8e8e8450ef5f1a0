"""The state of an unfinished training in one file: what `--resume` needs to go on to the same result."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vicinal.checkpoint import read_tensors, write_tensors
from vicinal.errors import CheckpointError, ConfigError
from vicinal.training.config import TrainConfig, as_dict, lasting
from vicinal.training.learner import Learner

Facts = dict[str, Any]  # what a run depends on besides its config: backbone, classes, domains


class Best:
    """The weights with the highest validation accuracy so far."""

    def __init__(self) -> None:
        self.accuracy: float | None = None
        self.iteration = 0
        self.weights: dict[str, Tensor] = {}

    def offer(self, learner: Learner, accuracy: float | None, iteration: int) -> None:
        """Keep a copy of the weights if they are the best; with nothing to choose by, the last ones count."""
        if accuracy is None or self.accuracy is None or accuracy > self.accuracy:
            self.accuracy, self.iteration = accuracy, iteration
            self.weights = {name: value.clone() for name, value in _weights(learner).items()}

    def restore(self, learner: Learner) -> None:
        """Put the best weights back."""
        if self.weights:
            _load_weights(learner, self.weights)


def _weights(learner: Learner) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": value
        for part, module in learner.parts.items()
        for name, value in module.state_dict().items()
    }


def _load_weights(learner: Learner, weights: dict[str, Tensor]) -> None:
    for part, module in learner.parts.items():
        module.load_state_dict(_under(f"{part}.", weights))


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def save_state(path: Path, learner: Learner, best: Best, stage: str, iteration: int, facts: Facts) -> None:
    """Write everything the next iteration depends on."""
    tensors = {f"now.{name}": value for name, value in _weights(learner).items()}
    if not all(torch.isfinite(value).all() for value in tensors.values()):
        raise CheckpointError(f"{path}: the weights are not finite; the last good state was kept")
    tensors |= {f"best.{name}": value for name, value in best.weights.items()}
    if learner.average is not None:
        tensors |= {f"average.{name}": value for name, value in learner.average.state_dict().items()}
    for index, state in learner.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    tensors |= {"draws": learner.draws.get_state(), "noise": learner.noise.get_state()}
    header = {
        "kind": "state",
        "stage": stage,
        "iteration": iteration,
        "seconds": learner.seconds,
        "config": {**as_dict(learner.config), **facts},
    }
    header |= {"best_accuracy": best.accuracy, "best_iteration": best.iteration}
    write_tensors(path, tensors, header)


def load_state(path: Path, learner: Learner, best: Best, stage: str, facts: Facts) -> int:
    """Restore a learner and return the iterations behind it; a state of other settings is refused."""
    tensors, header = read_tensors(path)
    if header.get("kind") != "state" or header["stage"] != stage:
        raise CheckpointError(f"{path}: not a training state of stage '{stage}'")
    # Facts that were not asked about when a run was started are taken to be the same.
    known = {name: value for name, value in facts.items() if name in header["config"]}
    same_config(path, header["config"], {**lasting(learner.config), **known})
    _load_weights(learner, _under("now.", tensors))
    if learner.average is not None:
        learner.average.load_state_dict(_under("average.", tensors))
    best.weights = {n: v.to(learner.device) for n, v in _under("best.", tensors).items()}
    best.accuracy = header["best_accuracy"]
    best.iteration = header["best_iteration"]
    _load_optimizer(learner.optimizer, _under("optimizer.", tensors))
    learner.draws.set_state(tensors["draws"])
    try:
        learner.noise.set_state(tensors["noise"])
    except RuntimeError:  # draws on a GPU and on a CPU are not the same, nor are their states
        raise CheckpointError(
            f"{path}: was made on another kind of device than {learner.device}: "
            "go on there, or start anew in another folder"
        ) from None
    learner.seconds = header.get("seconds", 0.0)
    iteration: int = header["iteration"]
    return iteration


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def same_config(path: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise, naming what differs, unless a run was started with the settings it is to go on with."""
    # A run from before an option existed did what is now that option's default.
    stored = {**as_dict(TrainConfig()), **stored}
    differing = [name for name in wanted if stored.get(name) != wanted[name]]
    if differing:
        pairs = ", ".join(f"{n} was {stored.get(n)} and is now {wanted[n]}" for n in differing)
        raise ConfigError(f"{path}: cannot resume with other settings ({pairs})")
