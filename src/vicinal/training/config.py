"""Everything that training can be told, each constant of the method with its reason."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from vicinal.adapters.settings import Predict
from vicinal.adapters.vnl import Vnl
from vicinal.adapters.vnl_settings import UPDATES, VOTES, Update, Votes
from vicinal.data.augment import Augment
from vicinal.data.transforms import HARDENINGS
from vicinal.errors import ConfigError, UnknownNameError
from vicinal.fields import check_fields
from vicinal.models.classifier import PRECISIONS


@dataclass(frozen=True)
class TrainConfig:
    """How the source model is trained; the defaults are for a small net from scratch."""

    algorithm: str = "meta"
    iterations: int = 200
    batch_size: int = 35  # images of each of the two batches of an iteration; ERM takes both at once
    backbone_lr: float = 5e-3  # peak of a one-cycle schedule; lambda_2 of the paper for the features
    head_lr: float = 5e-3  # the classifier's
    phi_lr: float = 1e-3  # lambda_3
    adapt_lr: float = 1e-4  # lambda_1, the simulated generalization step
    label_smoothing: float = 0.1  # better on validation data and on left-out domains (docs/experiments.md)
    group_size: int = 20  # neighbors phi sees at once: the batch size of test time, not of training
    num_samples: int = 10  # draws of w
    draw_labels: bool = False  # one-hot draws of y_hat in the inner step instead of its probabilities
    kl_weight: float = 1.0  # on a KL that is a mean over features
    phi_layers: int = 3  # linear maps of the paper's phi, its two heads among them; the paper tries 2 and 3
    second_order: bool = False
    difference: float = 1e-2  # length of the central difference along the meta gradient, for second order
    joint_features: bool = False  # let the loss of the labels reach the features too
    augment: Augment | None = None
    average: float = 0.0  # last share of the iterations whose weights are averaged; 0: the best by validation
    # Of the features in training on a GPU: about half the time of single precision. Weights, head, losses and
    # steps stay in single precision, and so does the trained model.
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    # Compile the features (torch.compile): starting takes about a minute, then steps take less time. For long
    # runs; needs what torch compiles with, else the net runs as written.
    compile: bool = False
    validate_every: int = 50
    save_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        positive = ("iterations", "batch_size", "group_size", "validate_every", "save_every")
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.precision not in PRECISIONS:
            raise UnknownNameError("precision", self.precision, PRECISIONS)
        if self.phi_layers < 2:
            raise ConfigError(f"phi_layers must be at least 2, its heads, not {self.phi_layers}")
        if self.num_samples < 0 or not 0 <= self.label_smoothing < 1:
            raise ConfigError("training needs num_samples of at least 0 and label_smoothing in [0, 1)")
        if not 0 <= self.average <= 1:
            raise ConfigError(f"average is a share of the iterations, from 0 to 1, not {self.average}")
        for name in ("backbone_lr", "head_lr", "phi_lr", "adapt_lr", "difference"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")


def for_pretrained(**options: Any) -> TrainConfig:
    """Return the paper's step sizes, for a backbone that starts from pretrained weights."""
    paper: dict[str, Any] = {
        "backbone_lr": 5e-5,
        "head_lr": 1e-4,
        "phi_lr": 1e-4,
        "iterations": 2000,
        "batch_size": 70,
    }
    return TrainConfig(**(paper | {"augment": Augment(), "validate_every": 100} | options))


# Options that came after the first models, and what those did.
LATER = {
    "average": 0.0,
    "predictors": ["own", "labels"],
    "calibrate": False,
    "agreement": False,
    "left_out_iterations": None,
    "votes": "once",
}
STARTS = (["False"], ["True"], ["False", "True"])
# How sure predictions may be, and the options of `OutOfFoldConfig` that ask for it: as sure as they are, by a
# temperature that is fitted on left-out streams, or, those of `vnl`, as they agree with the frozen source
# model where these streams take that.
SURENESS: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {
        "none": {},
        "temperature": {"calibrate": True},
        "agreement": {"calibrate": True, "agreement": True},
    }
)


def asked_sureness(name: str) -> Mapping[str, bool]:
    """Return the options that ask for a way to be sure, by its name."""
    if name not in SURENESS:
        raise UnknownNameError("way to calibrate", name, SURENESS)
    return SURENESS[name]


@dataclass(frozen=True)
class OutOfFoldConfig:
    """How phi is fitted on domains its models never saw, and how the rule of test time is chosen."""

    leave_out: int = 0  # domains each left-out model goes without; 0: two with four sources or more, else one
    batch_size: int = 20
    stream_images: int | None = 500  # at most this many images of a left-out domain
    # Dirichlet parameters of further streams with drawn class marginals: without any, phi takes for granted
    # that the target's classes are as frequent as the sources' (docs/experiments.md, section 19).
    marginals: tuple[float, ...] = (1.0,)
    hardenings: tuple[str, ...] = ()  # further streams of transformed images
    hidden: int = 32
    rounds: int = 2
    decay: float = 0.9
    epochs: int = 50  # 30 to 100 are level on digits, 300 is worse: streams are few
    fit_lr: float = 1e-2
    num_samples: int = 4  # draws of w in fitting
    posterior_weight: float = 0.0
    kl_weight: float = 0.0
    step_sizes: tuple[float, ...] = (3e-4, 1e-3, 2e-3)
    updates: tuple[Update, ...] = ("none", "marginal")
    # Who may predict: the model's own output, labels by phi, labels by nearest neighbors.
    predictors: tuple[Predict, ...] = ("own", "labels")
    votes: Votes = "rounds"  # how nearest neighbors vote: `VOTES`
    from_rest: tuple[bool, ...] = (False, True)  # ways for Adam's momentum to start that are tried
    heed_doubt: bool = True  # whether steps are shorter where the anchor doubts less than on these streams
    tolerance: float = 0.005  # accuracies this close count as level: the safer update or predictor is taken
    # Whether a temperature is fitted to predictions there too: how sure a method, of vicinal's or not, may be
    # of what it says of a domain that its model never saw.
    calibrate: bool = False
    # Whether, where it is fitted, predictions after an update may instead be as sure as they agree with the
    # frozen model's, if left-out streams say so: right for PACS, wrong for digits, whose updated models are
    # far better than the frozen ones (docs/experiments.md, section 43).
    agreement: bool = False
    # Iterations of left-out models; None: as many as the source model's. Fewer are less work, and harder
    # lessons: weaker models make more mistakes.
    left_out_iterations: int | None = None
    # Of step sizes and starts this close the one of the lowest NLL is taken, for baselines too: steps that
    # are too long make a model sure of its mistakes first.
    near: float = 0.02
    baselines: tuple[str, ...] = ("soft", "hard", "probabilistic")

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.hardenings:
            if name not in HARDENINGS:
                raise UnknownNameError("hardening", name, HARDENINGS)
        if any(not alpha > 0 for alpha in self.marginals):
            raise ConfigError(f"alpha of a drawn class marginal must be above 0, not {min(self.marginals)}")
        for update in self.updates:
            if update not in UPDATES:
                raise UnknownNameError("update", update, UPDATES)
        for predictor in self.predictors:
            if predictor not in Vnl.predicts:
                raise UnknownNameError("predictor", predictor, Vnl.predicts)
        if self.votes not in VOTES:
            raise UnknownNameError("way to vote", self.votes, VOTES)
        for name in ("epochs", "batch_size", "rounds", "hidden", "stream_images"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"out-of-fold fitting needs {name} of at least 1, not {value}")
        for name in ("leave_out", "num_samples", "posterior_weight", "kl_weight", "tolerance", "near"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"out-of-fold fitting needs {name} of at least 0, not {value}")
        if not self.fit_lr > 0 or not all(size > 0 for size in self.step_sizes):
            raise ConfigError("out-of-fold fitting needs fit_lr and all step_sizes above 0")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"out-of-fold fitting needs a decay above 0 and at most 1, not {self.decay}")
        if self.left_out_iterations is not None and self.left_out_iterations < 1:
            raise ConfigError(f"left_out_iterations must be at least 1, not {self.left_out_iterations}")
        if not self.step_sizes or not self.updates or not self.predictors:
            raise ConfigError("out-of-fold fitting needs a step size, an update and a predictor to try")
        starts = self.from_rest
        if not isinstance(starts, tuple) or sorted(map(repr, starts)) not in STARTS:
            raise ConfigError(f"from_rest lists the starts to try, False, True or both, not {starts!r}")


def lasting(config: TrainConfig | OutOfFoldConfig) -> dict[str, Any]:
    """Return, as plain values, all of a config that a trained model depends on, not what only takes time."""
    return {name: value for name, value in as_dict(config).items() if name not in ("save_every", "compile")}


def identity(config: TrainConfig | OutOfFoldConfig) -> dict[str, Any]:
    """Return what tells a trained model apart; it keeps its name when training learns to do more.

    An option that came later is left out while it is not used: what was trained before it is what it was.
    How neighbors vote is of no account where none may.
    """
    found = {name: value for name, value in lasting(config).items() if LATER.get(name, ...) != value}
    if isinstance(config, OutOfFoldConfig) and "neighbors" not in (*config.updates, *config.predictors):
        found.pop("votes", None)
    return found


def as_dict(config: TrainConfig | OutOfFoldConfig) -> dict[str, Any]:
    """Return a config as plain values that JSON keeps unchanged."""
    plain = dataclasses.asdict(config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
