"""PL: confident pseudo labels, as the T3A paper compares with them."""

from dataclasses import dataclass, field

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import optimizer_for, update_and_predict
from vicinal.adapters.settings import Predict, Settings
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.adapters.steps import labelling
from vicinal.checkpoint import Trained
from vicinal.errors import ConfigError
from vicinal.functional.peers_entropy import confident_cross_entropy


@dataclass(frozen=True)
class PlSettings(Settings):
    """What `pl` can be told besides what every method can."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("source"))
    predict: Predict = "before"
    lr: float = 5e-5  # DomainBed's for training, times 1 of the T3A code's {0.1, 1, 10}
    threshold: float = 0.9  # a label counts above this confidence; beta of the T3A code

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold < 1:
            raise ConfigError("pl needs a threshold of at least 0 and below 1")


TRAITS = Traits(
    paper="Lee 2013, as in Iwasawa and Matsuo 2021",
    updates="all parameters",
    batch_of_one="as any batch: source statistics",
    passes="1 forward, 1 backward",
)


@register("pl", PlSettings(), TRAITS)
class Pl(Adapter):
    """The argmax of a confident prediction is its label; all parameters updated.

    Lee, "Pseudo-label", ICML workshop 2013, in the form that Iwasawa and Matsuo, "Test-time classifier
    adjustment module" (T3A), NeurIPS 2021, compare with.

    Loss: L = -(1/|S|) sum_{i in S} log p[i, argmax_c p[i, c]], S = {i: max_c p[i, c] > threshold}. Where S is
    empty the gradient is zero; Adam still moves by what it remembers, as in the T3A code.
    Updated: all parameters.
    Prediction: before the last update of the batch.
    Statistics: the source's; the T3A code runs in evaluation mode.
    Defaults: threshold 0.9 and Adam of the T3A code, which searches step sizes of {0.1, 1, 10} times the one
    of training (5e-5, DomainBed's for ResNets) and 1 or 3 steps; here 1 and 1.
    """

    predicts = ("own", "before")
    steady = True
    settings: PlSettings

    def prepare(self, source: Trained) -> None:
        """Set up the optimizer."""
        self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Update by the confident labels; predict before the last update, or after it."""

        def loss(z: Tensor, logits: Tensor) -> Tensor:
            return confident_cross_entropy(logits, labelling(self, x, logits), self.settings.threshold)

        return update_and_predict(self, x, loss)
