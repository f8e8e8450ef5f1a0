"""TSD: a prototype classifier from a memory bank teaches the network, neighbors hold it together."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import look, optimizer_for, update_and_predict
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.adapters.supports import SupportSettings, add, one_hot, seed
from vicinal.checkpoint import Trained
from vicinal.errors import ConfigError
from vicinal.functional.peers_prototypes import nearest_supports, prototype_logits

TRAITS = Traits(paper="Wang et al. 2023", passes="2 forward, 1 backward")


@dataclass(frozen=True)
class TsdSettings(SupportSettings):
    """What `tsd` can be told besides what methods with supports can."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("batch"))
    lr: float = 1e-4  # with Adam; the authors' code, which also advises 1e-5, chosen by source validation
    per_class: int = 100  # memory bank, entropy filter; the authors' code
    neighbors: int = 3  # of the local clustering; the authors' code
    local_weight: float = 0.1  # lambda of the local clustering; from the paper only
    scale: float = 1.0  # of cosines before the softmax; the authors' code has a temperature of 1
    # Learn only from images on which classifier and prototypes agree; from the paper only.
    consistent: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neighbors < 1 or self.local_weight < 0 or not self.scale > 0:
            raise ConfigError(
                "tsd needs neighbors of at least 1, local_weight of at least 0, a scale above 0"
            )


@register("tsd", TsdSettings(), TRAITS)
class Tsd(Adapter):
    """Prototypes from a memory bank are taught the classifier's answers, and neighbors are drawn together.

    Wang, Zhang, Yan, Zhang and Li, Feature Alignment and Uniformity for Test Time Adaptation, CVPR 2023. The
    memory bank holds features s and predictions q of the stream, seeded with the classifier's rows; of each
    predicted class the `per_class` of lowest entropy stay (entropy filter). With p the model's prediction,
    c_k the mean of the normalised s of class k, and j over the `neighbors` nearest s,

        r_i = softmax(scale * cos(z_i, c)),
        L = mean over i in A of  -sum_k p_ik log r_ik + lambda mean_j cos(z_i, s_j) |p_i - q_j|^2,

    A the images on which p and r have the same argmax (consistency filter). p teaches in the first term and
    has no gradient there; in the second term it alone has one.

    Updated: all parameters, by Adam 1e-4.
    Prediction: after the update; the released code returns the pass whose gradient is taken ("before").
    Statistics: the batch's.
    Defaults: step size, optimizer, one step, 100 supports a class, 3 neighbors, temperature and
    statistics by the authors' code (batches of 128). The loss as it stands here, lambda and the consistency
    filter are from the paper only.

    Departs: from the released code, which has KL(r || p) in place of the first term and says that the other
    direction does as well; normalises by the sum of absolute values, takes the softmax of p once more,
    compares logits with probabilities in the second term, gives it the opposite sign and weight 0, and has no
    consistency filter. A batch enters the bank once, not in every step. With `per_class` -1 really all are
    kept, and the bank grows with the stream.
    """

    predicts = ("own", "before")
    needs_features = True
    settings: TsdSettings

    def prepare(self, source: Trained) -> None:
        """Start the bank from the classifier's rows."""
        self.optimizer = optimizer_for(self)
        head = self.model.linear
        self.classes = len(head.weight)
        seed(self)
        self.memory["predictions"] = (head.weight @ head.weight.T + head.bias).softmax(-1)

    def adapt(self, x: Tensor) -> Tensor:
        """Let the batch enter the bank, learn from it, and predict."""
        entered = self.settings.augment is not None
        if entered:
            self._enter(*look(self, x))

        def loss(z: Tensor, logits: Tensor) -> Tensor:
            nonlocal entered
            if not entered:  # the pass of the first update is the one that enters
                self._enter(z.detach(), logits.detach())
                entered = True
            return self._loss(z, logits)

        return update_and_predict(self, x, loss)

    def _enter(self, z: Tensor, logits: Tensor) -> None:
        add(self, z, logits, self.settings.per_class, predictions=logits.softmax(-1))

    def _loss(self, z: Tensor, logits: Tensor) -> Tensor:
        settings, bank = self.settings, self.memory
        unit = F.normalize(bank["supports"], dim=-1)
        r = prototype_logits(z, unit, one_hot(self, self.classes), settings.scale)
        p = logits.softmax(-1)
        taught = -(p.detach() * F.log_softmax(r, dim=-1)).sum(-1)
        with torch.no_grad():
            cosines, nearest = nearest_supports(z, bank["supports"], settings.neighbors)
            agree = (logits.argmax(-1) == r.argmax(-1)) | (not settings.consistent)
        apart = (p.unsqueeze(1) - bank["predictions"][nearest]).square().sum(-1)
        each = taught + settings.local_weight * (cosines * apart).mean(-1)
        weight = agree.to(each.dtype)
        return (weight * each).sum() / weight.sum().clamp_min(1)
