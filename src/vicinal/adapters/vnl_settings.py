"""What `vnl` can be told: how it updates, who predicts, and how neighbors vote."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from vicinal.adapters.settings import OF_STEPS, Predict, Settings
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.checkpoint import Trained
from vicinal.errors import ConfigError

Update = Literal["none", "marginal", "neighbors", "anchored", "entropy"]
UPDATES: tuple[Update, ...] = get_args(Update)  # from what can go wrong least to what can most
WITH_ANCHOR = ("marginal", "anchored")
WITH_SHARES = ("marginal", "neighbors")
# Idle where no neighbor has a say:
OF_VOTES = ("neighbors", "crowd", "crowd_limit", "tau", "voted", "rounds", "joint")
# Idle where nothing is updated:
OF_UPDATES = (
    *OF_STEPS,
    *(f"{name}_weight" for name in ("entropy", "neighbor", "share", "marginal", "anchor")),
    *("window", "share_window", "doubt", "agreement", "agreement_window", "agreement_prior"),
)
# How neighbors may vote: once, or in rounds, by two views and in a larger crowd, which they then have where
# they teach too (docs/experiments.md, section 46; with many classes `crowd_limit` makes it a smaller one).
Votes = Literal["once", "rounds"]
VOTES: Mapping[Votes, Mapping[str, Any]] = MappingProxyType(
    {"once": {}, "rounds": {"rounds": 3, "crowd": 120, "joint": True}}
)
LONGEST_WINDOW = 1e3  # of each class; far beyond it one image is lost in the rounding of the shares


@dataclass(frozen=True)
class VnlSettings(Settings):
    """What `vnl` can be told besides what every method can."""

    statistics: StatisticsConfig = field(default_factory=StatisticsConfig)
    predict: Predict = "labels"
    horizon: float | None = 1000.0
    from_rest: bool = True
    # Entropy with labels by nearest neighbors, with an anchor's class shares or labels, or alone; or none.
    update: Update = "marginal"
    entropy_weight: float = 1.0  # of the entropy of the model's own predictions
    neighbor_weight: float = 1.0  # of the cross-entropy with the labels by nearest neighbors
    share_weight: float = 1.0  # of the divergence of a batch's class shares from those along the stream
    share_window: float = 60.0  # images of each class over which those are averaged
    neighbors: int = 10  # nearest ones that vote, fewer where a class can have no more of them
    crowd: int = 30  # images of each class among which they are sought: the last of the stream
    tau: float = 0.1  # difference of cosines that makes a neighbor's vote e times as heavy
    voted: float = 0.8  # how much of a label is by votes; the rest is the model's own prediction
    # Of votes that predict: in later ones neighbors vote as the one before has labelled them. More than one
    # labels the whole crowd each time, at a cost that grows with its square.
    rounds: int = 1
    crowd_limit: int = 2000  # images in such a crowd at most, however many classes there are
    joint: bool = False  # whether neighbors are near by the anchor's features too: mean of both cosines
    marginal_weight: float = 3.0  # of the divergence of their class shares from those expected by the anchor
    window: float = 12.0  # images of each class over which these shares are averaged
    anchor_weight: float = 1.0  # of the cross-entropy with the anchor's labels
    # How much a frozen model doubted its predictions where lr was chosen: where the anchor doubts less, there
    # is less to learn and steps are that much shorter. None: they are not. With update="marginal" alone.
    doubt: float | None = None
    # How many errors it stands for where a prediction differs from the frozen source model's: kappa of
    # `expected_errors`. After an update predictions then are as sure as both agree; 0: as sure as they are.
    # For steps that move the model: one that stays where it is agrees with itself, and would be sure of
    # anything. Of an export it is no part.
    agreement: float = 0.0
    agreement_window: int = 200  # images over which that is counted
    agreement_prior: float = 20.0  # images that the predictions' own word counts for
    chosen_with = MappingProxyType(
        {
            "output_temperature": (*Settings.chosen_with["output_temperature"], "agreement", *OF_VOTES),
            "doubt": ("lr",),
            "agreement": (*Settings.chosen_with["output_temperature"], "output_temperature"),
        }
    )
    later: ClassVar[tuple[str, ...]] = (
        *Settings.later,
        "neighbor_weight",
        "share_weight",
        "share_window",
        *OF_VOTES,
        "agreement",
        "agreement_window",
        "agreement_prior",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update not in UPDATES:
            raise ConfigError(f"unknown update '{self.update}': choose from {', '.join(UPDATES)}")
        weights = ("entropy", "neighbor", "share", "marginal", "anchor")
        if min(getattr(self, f"{name}_weight") for name in weights) < 0:
            raise ConfigError("vnl needs weights of at least 0")
        if min(self.neighbors, self.crowd, self.crowd_limit, self.rounds) < 1:
            names = "neighbors, crowd, crowd_limit and rounds"
            raise ConfigError(f"vnl needs {names} that are whole numbers of at least 1")
        if not self.tau > 0 or not 0 <= self.voted <= 1:
            raise ConfigError("vnl needs a tau above 0 and voted between 0 and 1")
        if min(self.agreement, self.agreement_prior) < 0 or self.agreement_window < 1:
            raise ConfigError(
                "vnl needs agreement and agreement_prior of at least 0, and an agreement_window of images"
            )
        for window in (self.window, self.share_window):
            if not 0 < window <= LONGEST_WINDOW:
                raise ConfigError(
                    f"vnl needs windows of above 0 to {LONGEST_WINDOW:g} images of each class, not {window}"
                )
        if self.doubt is not None and not 0 <= self.doubt <= 1:
            raise ConfigError(f"doubt is a number from 0 to 1, or None; not {self.doubt!r}")

    @property
    def idle(self) -> tuple[str, ...]:
        """The options of votes, where nobody votes, and those of updates, where nothing is updated."""
        of_votes = () if "neighbors" in (self.predict, self.update) else OF_VOTES
        return of_votes if self.update != "none" else (*of_votes, *OF_UPDATES)

    def crowd_size(self, classes: int) -> int:
        """Return among how many images neighbors are sought."""
        wanted = self.crowd * classes
        return wanted if self.rounds == 1 else min(wanted, self.crowd_limit)

    def fallbacks(self, source: Trained) -> dict[str, Any]:
        """Return that own output predicts where there is no phi to give labels."""
        return {"predict": "own"} if source.predict_phi is None and self.update != "none" else {}
