"""SHOT-IM: information maximisation with the classifier fixed, online as the T3A paper compares with it."""

from dataclasses import dataclass, field

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import optimizer_for, update_and_predict
from vicinal.adapters.settings import Parameters, Predict, Settings
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.adapters.steps import labelling
from vicinal.checkpoint import Trained
from vicinal.errors import ConfigError
from vicinal.functional.peers_entropy import confident_cross_entropy, information_maximization


@dataclass(frozen=True)
class ShotImSettings(Settings):
    """What `shot_im` can be told besides what every method can."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("source"))
    predict: Predict = "before"
    lr: float = 5e-5  # DomainBed's for training, times 1 of the T3A code's {0.1, 1, 10}
    parameters: Parameters = "features"
    threshold: float = 0.9  # a label counts above this confidence; beta of the T3A code
    label_weight: float = 0.1  # of the labels' cross-entropy, theta of the T3A code; 0: its "SHOTIM"
    floor: float = 1e-5  # added to the mean prediction inside the logarithm, as in the T3A code

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold < 1 or self.label_weight < 0 or not self.floor > 0:
            raise ConfigError(
                "shot_im needs a threshold of at least 0 and below 1, a label_weight of at least 0 "
                "and a floor above 0"
            )


TRAITS = Traits(
    paper="Liang et al. 2020, as in Iwasawa and Matsuo 2021",
    updates="features; the classifier stays",
    batch_of_one="its two entropies cancel, up to the floor; a confident label teaches",
    passes="1 forward, 1 backward",
)


@register("shot_im", ShotImSettings(), TRAITS)
class ShotIm(Adapter):
    """Information maximised by the features, the classifier fixed.

    Liang, Hu, Feng, "Do we really need to access the source data? Source hypothesis transfer", ICML 2020, in
    the online form that Iwasawa and Matsuo (T3A), NeurIPS 2021, compare with.

    Loss: L = (1/N) sum_i H(p_i) + sum_c m_c log(m_c + floor) + label_weight * L_PL, m = (1/N) sum_i p_i, L_PL
    the cross-entropy with confident labels of `pl`.
    Updated: all parameters but those of the head; a model whose head is not found must name it.
    Prediction: before the last update of the batch.
    Statistics: the source's; the T3A code runs in evaluation mode.
    Defaults: the T3A code's "SHOT": floor 1e-5, threshold 0.9, label weight 0.1, Adam, see `pl` for the step
    size. `label_weight=0` is its "SHOTIM", information alone, and cls_par 0 of SHOT's own code.

    Departs: the original SHOT trains for 15 epochs over the whole target set, by SGD 1e-2 and 0.1 of that for
    the backbone, on batch statistics, with labels by centroids (weight 0.3), which no stream allows.
    """

    predicts = ("own", "before")
    steady = True
    settings: ShotImSettings

    def prepare(self, source: Trained) -> None:
        """Set up the optimizer on everything but the head."""
        if self.settings.parameters == "features":
            self.model.linear  # noqa: B018  raises, saying what to pass, where no head can be kept
        self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Maximise information; predict before the last update, or after it."""
        settings = self.settings

        def loss(z: Tensor, logits: Tensor) -> Tensor:
            value = information_maximization(logits, settings.floor)
            if settings.label_weight == 0:
                return value
            told = labelling(self, x, logits)
            return value + settings.label_weight * confident_cross_entropy(logits, told, settings.threshold)

        return update_and_predict(self, x, loss)
