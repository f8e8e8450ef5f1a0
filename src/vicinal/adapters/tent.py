"""Tent: test-time entropy minimisation."""

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import optimizer_for, update_and_predict
from vicinal.adapters.settings import Settings
from vicinal.checkpoint import Trained
from vicinal.functional.losses import prediction_entropy

TRAITS = Traits(
    paper="Wang et al. 2021",
    updates="scale and shift of normalization layers; all parameters with parameters='all'",
    batch_of_one="predicted, and updated, on the average over the stream",
    norms="any; a net without any needs parameters='all'",
    passes="1 forward, 1 backward",
)


@register("tent", Settings(predict="before", lr=1e-3, parameters="norm"), TRAITS)
class Tent(Adapter):
    """Entropy of the predictions minimised by scale and shift of the normalization layers.

    Wang, Shelhamer, Liu, Olshausen, Darrell, "Tent: fully test-time adaptation by entropy minimization",
    ICLR 2021.

    Loss: L = (1/N) sum_i H(p_i), H(p) = -sum_c p_c log p_c.
    Updated: scale and shift of every normalization layer (`parameters="norm"`); all parameters with
    `parameters="all"`, the variant that the paper's ablation and later papers call full.
    Prediction: before the last update of the batch, from the pass whose gradient is taken.
    Statistics: the batch's.
    Defaults: Adam, lr 1e-3, one step a batch, no reset: the authors' code for CIFAR-10-C (batch of 200).

    The authors' code updates BatchNorm alone; here GroupNorm and LayerNorm count as well.
    """

    steady = True
    predicts = ("own", "before")

    def prepare(self, source: Trained) -> None:
        """Set up the optimizer."""
        self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Lower the entropy of the predictions; predict before the last update, or after it."""
        return update_and_predict(self, x, lambda z, logits: prediction_entropy(logits))
