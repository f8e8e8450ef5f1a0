"""The contract of every test-time method: adapt, then predict; reset; save and restore.

An adapter owns a copy of the source model. `forward(x)` adapts to the batch and returns the logits from after
the update. `reset()` restores the source bit for bit. `state_dict()` holds everything a stream has left
behind, optimizer and random generator included, so that loading it continues the stream exactly.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from vicinal.adapters.statistics import NormStatistics, StatisticsConfig
from vicinal.checkpoint import Trained
from vicinal.data.augment import Augment
from vicinal.errors import AdapterError, ConfigError
from vicinal.registry import Registry
from vicinal.types import Head

Predict = Literal["own", "labels"]
Observer = Callable[[Tensor, Tensor, Head], None]


@dataclass(frozen=True)
class Settings:
    """What every method can be told; a method with more to say adds fields."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("batch"))
    predict: Predict = "own"  # with the updated model's own output, or with the labels
    lr: float = 1e-4  # step size of Adam on all parameters, lambda_1 of the paper
    steps: int = 1  # updates a batch
    num_samples: int = 10  # draws of w, or of one-hot labels
    augment: Augment | None = None  # the view the update runs on; labels and predictions use the clean one
    episodic: bool = False  # back to the source before every batch
    seed: int = 0

    def __post_init__(self) -> None:
        if self.predict not in ("own", "labels"):
            raise ConfigError(f"unknown predict '{self.predict}': choose from own, labels")
        if not self.lr > 0 or self.steps < 1 or self.num_samples < 0:
            raise ConfigError(
                "an adapter needs lr above 0, steps of at least 1 and num_samples of at least 0"
            )


class Adapter(nn.Module, ABC):
    """A model that adapts itself to what it is asked to predict.

    A method fills in `adapt` and, where it has state of its own, `prepare`.
    """

    predicts: tuple[Predict, ...] = ("own",)

    def __init__(self, source: Trained, settings: Settings) -> None:
        super().__init__()
        if settings.predict not in self.predicts:
            raise ConfigError(f"this method predicts by {' or '.join(self.predicts)}, not {settings.predict}")
        self.settings = settings
        self.model = copy.deepcopy(source.model).eval().requires_grad_(True)
        self.norm = NormStatistics(self.model, settings.statistics)
        self.optimizer: torch.optim.Optimizer | None = None
        self.observer: Observer | None = None  # sees features, logits and head of every prediction
        self.steps_taken = 0
        device = next(self.model.parameters()).device
        self.generator = torch.Generator(device=device).manual_seed(settings.seed)
        self.prepare(source)
        # What state_dict hands out must not change when the stream goes on.
        self.register_state_dict_post_hook(_cut_off)  # type: ignore[no-untyped-call]
        self._initial = copy.deepcopy(self.state_dict())

    def prepare(self, source: Trained) -> None:
        """Set up what the method keeps besides the model."""

    @abstractmethod
    def adapt(self, x: Tensor) -> Tensor:
        """Adapt to a batch and return its logits from after the update."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, C) of images in [0, 1] after adapting to them."""
        x = self._checked(x)
        if self.settings.episodic:
            self.reset()
        self.norm.begin()
        with torch.enable_grad():
            logits = self.adapt(x)
        self.steps_taken += 1
        return logits.detach()

    def reset(self) -> None:
        """Go back to the source model, bit for bit, and forget the stream."""
        self.load_state_dict(self._initial)

    def get_extra_state(self) -> dict[str, Any]:
        """Return what is not a tensor of the module tree: optimizer, random state, count of steps."""
        # Copied: an optimizer goes on writing into the tensors its state_dict hands out.
        optimizer = None if self.optimizer is None else copy.deepcopy(self.optimizer.state_dict())
        return {"optimizer": optimizer, "generator": self.generator.get_state(), "steps": self.steps_taken}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_extra_state` returned."""
        if self.optimizer is not None:
            # Copied again: the optimizer adopts the tensors it is given and would write into the snapshot.
            with torch.inference_mode(False):
                self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.generator.set_state(state["generator"].cpu())
        self.steps_taken = state["steps"]

    def _checked(self, x: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            raise AdapterError("adapters update by gradients: call them outside torch.inference_mode()")
        channels = self.model.mean.shape[1]
        if x.ndim != 4 or x.shape[1] != channels or len(x) == 0:
            raise AdapterError(f"expected a batch of images (N >= 1, {channels}, H, W), got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise AdapterError(f"expected images as floats in [0, 1], got {x.dtype}: divide by 255 first")
        if not torch.isfinite(x).all():
            raise AdapterError(
                "the batch holds pixels that are not finite: it was refused, nothing was updated"
            )
        return (x.clone() if x.is_inference() else x).to(self.model.mean.dtype)


def _cut_off(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.detach().clone()


@dataclass(frozen=True)
class Method:
    """A registered method: how to build it, what it starts from, and a line about it."""

    build: type[Adapter]
    defaults: Settings
    summary: str


METHODS: Registry[Method] = Registry("method")
A = TypeVar("A", bound=type[Adapter])


def register(name: str, defaults: Settings) -> Callable[[A], A]:
    """Return a decorator that files an adapter under `name`; its docstring's first line is the summary."""

    def file(adapter: A) -> A:
        summary = (adapter.__doc__ or "").strip().splitlines()[0]
        METHODS.register(name)(Method(adapter, defaults, summary))
        return adapter

    return file


def configure(defaults: Settings, options: dict[str, Any]) -> Settings:
    """Return the settings with the options put in; `statistics` may be just the name of a kind."""
    known = {item.name for item in fields(defaults)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)}: choose from {', '.join(sorted(known))}")
    if isinstance(options.get("statistics"), str):
        options = {**options, "statistics": replace(defaults.statistics, kind=options["statistics"])}
    return replace(defaults, **options)


def servable(source: Trained) -> list[str]:
    """Return the methods this model has everything for."""
    found = []
    for name in METHODS:
        try:
            adapt(source, name)
        except AdapterError:
            continue
        found.append(name)
    return found


def adapt(source: Trained, method: str = "vnl", **options: Any) -> Adapter:
    """Return a live adapter of a trained model.

    Options override what was chosen on left-out source domains, which overrides the method's own defaults.
    """
    entry = METHODS[method]
    chosen = source.choice.get("methods", {}).get(method, {})
    kind = options.get("statistics", entry.defaults.statistics.kind)
    by_kind = chosen.get(kind.kind if isinstance(kind, StatisticsConfig) else kind, {})
    with torch.inference_mode(False):  # tensors made in that mode could never be updated
        return entry.build(source, configure(entry.defaults, {**by_kind, **options}))
