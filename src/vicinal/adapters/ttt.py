"""TTT: a rotation head on the shared features, trained with the source, goes on learning at test time."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import look, optimizer_for, predict, take_step
from vicinal.adapters.settings import Parameters, Settings
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.checkpoint import Trained
from vicinal.errors import AdapterError, ConfigError
from vicinal.functional.peers_consistency import quarter_turns
from vicinal.models.auxiliary import ROTATIONS, filled, part_of, rotation_head


@dataclass(frozen=True)
class TttSettings(Settings):
    """What `ttt` can be told besides what every method can."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("batch"))
    lr: float = 1e-3  # of the paper and the code
    parameters: Parameters = "features"
    optimizer: Literal["adam", "sgd"] = "sgd"
    momentum: float = 0.0  # the code's plain SGD
    rotations: Literal["all", "random"] = "all"  # of each image: all four, or one of them by chance

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotations not in ("all", "random"):
            raise ConfigError(f"unknown rotations '{self.rotations}': choose from all, random")


@register(
    "ttt",
    TttSettings(),
    Traits(
        paper="Sun, Wang, Liu, Miller, Efros, Hardt 2020",
        updates="features and the rotation head",
        training="--algorithm ttt (a rotation head trained jointly)",
        batch_of_one="as any other: its four rotations",
        passes="5 forward, 4 backward",
    ),
)
class Ttt(Adapter):
    """The features go on learning to tell by how many quarter turns images were rotated.

    Sun, Wang, Liu, Miller, Efros, Hardt: Test-Time Training with Self-Supervision for Generalization under
    Distribution Shifts, 2020. loss = CE(rotation head(features(R_k x)), k), R_k a rotation by k quarter
    turns; features and rotation head are updated by plain SGD at 1e-3, one step, the classifier stays;
    prediction comes after the update. The stream goes on from what it has learned (the paper's online
    version); episodic=True is its standard one. Needs a model trained with the algorithm `ttt`.

    Departs from the paper: the head stands on the last features, not halfway; each image comes in all four
    rotations (`rotations`: "random" for one by chance, as in training), where the authors' code takes 32
    random crops of an image with a chance rotation each. Batch statistics stand for the training mode that
    their code adapts in; the models of their tables have GroupNorm and no such statistics.
    """

    predicts = ("own", "before")
    needs_features = True
    settings: TttSettings

    def prepare(self, source: Trained) -> None:
        """Take the rotation head over; it is updated with the features."""
        self.rotation = told_head(source, self.model.linear.weight)
        self.optimizer = optimizer_for(self)
        self.optimizer.add_param_group({"params": list(self.rotation.parameters())})

    def adapt(self, x: Tensor) -> Tensor:
        """Learn the rotations of the batch, then predict it."""
        if x.shape[-1] != x.shape[-2]:
            raise AdapterError(f"ttt rotates images by quarter turns: they must be square, not {_size(x)}")
        before = None
        for step in range(self.settings.steps):
            if self.settings.predict == "before" and step == self.settings.steps - 1:
                before = predict(self, x)[1]
            self._learn(x)
        return predict(self, x)[1] if before is None else before

    def _learn(self, x: Tensor) -> None:
        assert self.optimizer is not None
        if not self.norm.observed(len(x)):
            look(self, x)  # what the update moves is measured on the clean view, before and after
        augment = self.settings.augment
        view = x if augment is None else augment(x, self.generator)
        rotated, turns = self._rotated(view)
        # The number of images decides: four rotations of one do not make a batch's statistics.
        with self.norm.updating(len(x), views=len(rotated) // len(x)):
            z, _ = self.model.features_and_logits(rotated)
        self.optimizer.zero_grad(set_to_none=True)
        cross_entropy(self.rotation(z), turns).backward()  # type: ignore[no-untyped-call]
        take_step(self)

    def _rotated(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.settings.rotations == "random":
            device = self.generator.device
            turns = torch.randint(ROTATIONS, (len(x),), generator=self.generator, device=device)
            return quarter_turns(x, turns), turns
        turns = torch.arange(ROTATIONS, device=x.device).repeat_interleave(len(x))
        return torch.cat([torch.rot90(x, count, (-2, -1)) for count in range(ROTATIONS)]), turns


def told_head(source: Trained, like: Tensor) -> nn.Linear:
    """Return the rotation head that training left, or say how to get one."""
    weights = part_of(source.extras, "ttt")
    if not weights:
        raise AdapterError(
            "method 'ttt' needs a model trained with --algorithm ttt; "
            f"this one was trained with '{source.algorithm}'"
        )
    return filled(lambda: rotation_head(weights["weight"].shape[1]), weights, like)


def _size(x: Tensor) -> str:
    return f"{x.shape[-2]} x {x.shape[-1]}"
