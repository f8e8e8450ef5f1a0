"""What every test-time method can be told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from vicinal.adapters.statistics import StatisticsConfig
from vicinal.checkpoint import Trained
from vicinal.data.augment import Augment
from vicinal.data.augmix import AugMix
from vicinal.errors import ConfigError
from vicinal.fields import check_fields
from vicinal.models.classifier import PRECISIONS

# "own": the model's own output from after the update ("after" means the same); "before": from before it;
# "labels": the labels that the method infers; "neighbors": those by votes of nearest neighbors.
Predict = Literal["own", "before", "labels", "neighbors"]
Parameters = Literal["all", "norm", "features", "head"]
PREDICTS = ("own", "before", "labels", "neighbors")
PARAMETERS = ("all", "norm", "features", "head")
OPTIMIZERS = ("adam", "sgd")
# Options of what is updated by gradients, and how: idle where nothing is.
OF_STEPS = ("lr", "steps", "parameters", "optimizer", "momentum", "pull", "horizon", "from_rest", "augment")


@dataclass(frozen=True)
class Settings:
    """What every method can be told; a method with more to say adds fields."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("batch"))
    predict: Predict = "own"
    lr: float = 1e-4  # step size, lambda_1 of the paper
    steps: int = 1  # updates a batch
    parameters: Parameters = "all"  # what is updated; "norm": scale and shift of normalization layers
    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: float = 0.9  # of SGD
    # How far what is updated goes back toward the source after each update. Updates without end can carry a
    # model anywhere, at any step size; this bounds how far, so that a long stream is like a short one.
    pull: float = 0.0
    # Images after which a step is half as long: lr / (1 + seen / horizon); None: all steps are alike. Short
    # steps average noise out, and a long stream then carries a model little further than a short one.
    horizon: float | None = None
    # Whether Adam's momentum starts from nothing. As it is, a first step is divided by 1 - beta_1, to ten
    # times what momentum has gained: first steps are the longest, and a deep net can lose by them what others
    # gain. With episodes all are first steps, from rest a tenth of lr.
    from_rest: bool = False
    num_samples: int = 10  # draws of w, or of one-hot labels
    augment: Augment | AugMix | None = None  # the update's view; labels and predictions use the clean one
    episodic: bool = False  # back to the source before every batch
    # What the features are computed in; weights, steps, labels and statistics stay in single precision.
    precision: Literal["float32", "bfloat16"] = "float32"
    # What logits are divided by at last: predictions stay what they are and become less sure above 1. Of what
    # the model learns from, and of what an export hands out, it is no part.
    output_temperature: float = 1.0
    seed: int = 0
    # Options that were chosen along with a rule and say nothing of another one, by what makes it another.
    chosen_with: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"output_temperature": ("lr", "update", "predict")}
    )
    later: ClassVar[tuple[str, ...]] = ("output_temperature",)  # options that came after records were made

    def __post_init__(self) -> None:
        choices = (
            ("predict", PREDICTS),
            ("parameters", PARAMETERS),
            ("optimizer", OPTIMIZERS),
            ("precision", PRECISIONS),
        )
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ConfigError(f"unknown {name} '{getattr(self, name)}': choose from {', '.join(known)}")
        check_fields(self)
        if not self.lr > 0:
            raise ConfigError(f"an adapter needs lr above 0, not {self.lr!r}")
        if self.steps < 1 or self.num_samples < 0 or not 0 <= self.momentum < 1 or not 0 <= self.pull < 1:
            raise ConfigError(
                "an adapter needs steps of at least 1, num_samples of at least 0, "
                "momentum and pull of at least 0 and below 1"
            )
        if not self.output_temperature > 0:
            raise ConfigError(
                f"an adapter needs an output_temperature above 0, not {self.output_temperature!r}"
            )
        if self.horizon is not None and not self.horizon > 0:
            raise ConfigError(f"a horizon is a number of images above 0, or None; not {self.horizon!r}")

    @property
    def idle(self) -> tuple[str, ...]:
        """Options that play no part, as the others are."""
        return ()

    def fallbacks(self, source: Trained) -> dict[str, Any]:
        """Return options for a model that lacks what the defaults take for granted."""
        return {}
