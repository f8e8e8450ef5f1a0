"""T3A: the classifier's rows are replaced by prototypes of the stream."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import predict
from vicinal.adapters.supports import SupportSettings, add, one_hot, seed
from vicinal.checkpoint import Trained
from vicinal.functional.peers_prototypes import prototype_logits

TRAITS = Traits(
    paper="Iwasawa and Matsuo 2021",
    updates="prototypes of the classes; no parameter",
    batch_of_one="as any other batch",
    passes="1 forward",
)


@register("t3a", SupportSettings(), TRAITS)
class T3A(Adapter):
    """Prototypes of the stream, from its most certain images of each class, stand in for the classifier.

    Iwasawa and Matsuo, Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization,
    NeurIPS 2021. No loss and no gradient. The supports S_k of class k start with the row w_k of the
    classifier; every image joins those of the class it is predicted as, and of each class the `per_class`
    with the lowest prediction entropy stay. Then

        c_k = sum of s / |s| over s in S_k,        logit_k = z' c_k / |c_k|.

    Updated: the supports. Prediction: after the batch has joined them; "before": from what was there already.
    Source statistics, as in the authors' code (evaluation mode). `per_class` = 20, from the paper's choices
    1, 5, 20, 50, 100 and all; with -1 really all are kept (the released code drops the last one of every
    class), as one sum a class, so that an endless stream needs no more memory. The entropies that select are
    those of the source classifier, as in the paper. A class without any support is not predicted.
    """

    still = True
    takes_steps = False
    predicts = ("own", "before")
    needs_features = True
    own_scale = True
    settings: SupportSettings

    def prepare(self, source: Trained) -> None:
        """Start from the classifier's rows."""
        self.model.requires_grad_(False)
        self.classes = len(self.model.linear.weight)
        seed(self)
        self.memory["supports"] = F.normalize(self.memory["supports"], dim=-1)

    def adapt(self, x: Tensor) -> Tensor:
        """Let the batch join the supports and predict by the prototypes."""
        z, logits = predict(self, x)
        if self.settings.predict == "before":
            before = self._logits(z)
            self._join(z, logits)
            return before
        self._join(z, logits)
        return self._logits(z)

    def _logits(self, z: Tensor) -> Tensor:
        cosines = prototype_logits(z, self.memory["supports"], one_hot(self, self.classes), 1.0)
        logits: Tensor = z.norm(dim=-1, keepdim=True) * cosines
        return logits

    def _join(self, z: Tensor, logits: Tensor) -> None:
        add(self, F.normalize(z, dim=-1), logits, self.settings.per_class)
        if self.settings.per_class == -1:
            sums = one_hot(self, self.classes).T @ self.memory["supports"]
            classes = torch.arange(self.classes, device=sums.device)
            self.memory.update(supports=sums, labels=classes, entropy=torch.zeros_like(sums[:, 0]))
