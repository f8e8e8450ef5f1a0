"""LAME: predictions of a batch are smoothed over its neighbors."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import predict
from vicinal.adapters.settings import Settings
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.checkpoint import Trained
from vicinal.errors import AdapterError, ConfigError
from vicinal.functional.peers_prototypes import (
    knn_affinity,
    linear_affinity,
    rbf_affinity,
    smoothed_assignments,
)
from vicinal.models.wrap import Wrapped

AFFINITIES = {"knn": knn_affinity, "rbf": rbf_affinity, "linear": linear_affinity}
TRAITS = Traits(
    paper="Boudiaf et al. 2022",
    updates="the predictions; no parameter",
    batch_of_one="the model's own prediction: it has no neighbors",
    passes="1 forward",
)


@dataclass(frozen=True)
class LameSettings(Settings):
    """What `lame` can be told besides what every method can."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("source"))
    affinity: Literal["knn", "rbf", "linear"] = "knn"  # from the paper only; the authors' code starts at rbf
    neighbors: int = (
        5  # of an image, and of the width of rbf; LAME_KNN of the authors' code, chosen of 1, 3, 5
    )
    iterations: int = 100  # at most; the authors' code
    tolerance: float = 1e-8  # relative change of the energy that counts as none; the authors' code

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.affinity not in AFFINITIES:
            raise ConfigError(f"unknown affinity '{self.affinity}': choose from {', '.join(AFFINITIES)}")
        if self.neighbors < 1 or self.iterations < 1 or self.tolerance < 0:
            raise ConfigError(
                "lame needs neighbors and iterations of at least 1 and a tolerance of at least 0"
            )


@register("lame", LameSettings(), TRAITS)
class Lame(Adapter):
    """Predictions of a batch are smoothed over neighboring images; the model stays as it is.

    Boudiaf, Mueller, Ben Ayed and Bertinetto, Parameter-free Online Test-time Adaptation, CVPR 2022. The
    assignments y of a batch minimise

        sum_i KL(y_i || p_i) - sum_ij w_ij y_i' y_j,      y_i <- softmax(log p_i + sum_j w_ij y_j),

    p the model's predictions, iterated until the energy stands still, at most `iterations` times. Affinity
    `knn`: w_ij = 1 for the `neighbors` nearest of i by the distance of normalised features, not made
    symmetric, as in the authors' code; `rbf`: exp(-d^2 / 2 s^2); `linear`: the cosine.

    Updated: nothing.
    Prediction: log y, of the batch at hand alone.
    Statistics: the source's, as in the authors' code.
    Defaults: 5 neighbors, at most 100 iterations and the tolerance by the authors' code; `knn` is from the
    paper only.

    Departs: the released configuration has `rbf` where nothing else is said, and tries all three; `knn` is
    kept because the pull of `rbf` grows with the batch. The code floors p at 1e-10; here its logarithm is
    exact. An image alone in its batch keeps its own prediction whatever the affinity. It gains where images
    that come together share classes, and loses on shuffled small batches of many classes, where most
    neighbors are of another class.
    """

    still = True
    takes_steps = False
    settings: LameSettings

    def prepare(self, source: Trained) -> None:
        """Check that there are features to tell neighbors by."""
        if not self.model.has_features:
            raise AdapterError(
                "lame needs features: name their layer, as in adapt(model, 'lame', features='pool')"
            )
        if isinstance(self.model, Wrapped):
            self.model.dispensable = False
        self.model.requires_grad_(False)

    def adapt(self, x: Tensor) -> Tensor:
        """Return the log of the smoothed assignments."""
        z, logits = predict(self, x)
        settings, log_p = self.settings, F.log_softmax(logits, dim=-1)
        if len(x) == 1:
            return log_p
        affinity = AFFINITIES[settings.affinity](z, settings.neighbors)
        return smoothed_assignments(log_p, affinity, settings.iterations, settings.tolerance)
