"""Prediction by the labels alone."""

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.labeler import StreamLabeler
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import as_logits, predict
from vicinal.adapters.vnl import fitted
from vicinal.adapters.vnl_settings import VnlSettings
from vicinal.checkpoint import Trained


@register(
    "labels",
    VnlSettings(update="none"),
    Traits(
        paper="vicinal",
        updates="normalization statistics and the memory of the stream",
        training="phi on left-out domains",
        passes="1 forward",
    ),
)
class Labels(Adapter):
    """Prediction by out-of-fold neighbor labels alone: stream statistics, no update.

    What `vnl` says when nothing is learned: phi reads the stream so far and labels the batch.
    """

    still = True
    takes_steps = False
    steady = True
    predicts = ("labels",)
    settings: VnlSettings

    def prepare(self, source: Trained) -> None:
        """Set up the labeler."""
        self.labeler = StreamLabeler(fitted(source.anchor_phi), self.model.linear)

    def adapt(self, x: Tensor) -> Tensor:
        """Return the log of the labels as logits."""
        z, logits = predict(self, x)
        draws = self.settings.num_samples
        y_hat: Tensor = self.labeler(z, logits, self.model.linear, draws, self.generator)
        self.draws = self.labeler.draws
        return as_logits(y_hat)
