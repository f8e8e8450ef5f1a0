"""Single-sample generalization: every image gets a classifier of its own, in one pass."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import as_logits, predict
from vicinal.adapters.settings import Settings
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.checkpoint import Trained
from vicinal.errors import AdapterError
from vicinal.functional.generated import generated_logits
from vicinal.models.auxiliary import filled, part_of
from vicinal.models.single_sample import SampleInferenceNet

NAME = "single_sample"  # of the net in Trained.extras
TRAITS = Traits(
    paper="Xiao et al. 2022",
    updates="nothing: a classifier is generated for every image",
    training="algorithm single_sample",
    batch_of_one="as any other batch",
    passes="1 forward",
)


@dataclass(frozen=True)
class SingleSampleSettings(Settings):
    """What `single_sample` can be told: what every method can."""

    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("source"))
    num_samples: int = 0  # draws of the classifier; 0: its mean, as in the paper at test time


@register("single_sample", SingleSampleSettings(), TRAITS)
class SingleSample(Adapter):
    """A net trained for it generates a classifier from each single image; nothing is updated.

    Xiao, Zhen, Shao and Snoek, Learning to Generalize across Domains on Single Test Samples, ICLR 2022. With
    z the feature of an image and w_c the rows of the source classifier, a net gives

        p(theta_c | x, theta_s) = N(mean(z, w_c), std(z, w_c)^2),    logit_c = z' mean(z, w_c) + b_c.

    The algorithm `single_sample` trains the net along with the model (its loss is there). Updated: nothing;
    images do not see one another. Prediction: one pass, by the mean as in the paper (`num_samples` 0), or by
    the mean softmax over draws; one draw of noise serves all images of a batch. Source statistics, as in the
    authors' code.

    Departs from the authors' code: z is the last feature alone, not also the means of earlier layers; theta_s
    is the linear classifier, not class means of source images; what is generated is a correction of its rows,
    and its bias stays.
    """

    steady = True
    takes_steps = False
    needs_features = True
    settings: SingleSampleSettings

    def prepare(self, source: Trained) -> None:
        """Take the net over from the checkpoint."""
        self.model.requires_grad_(False)
        rows, weights = self.model.linear.weight, part_of(source.extras, NAME)
        if not weights:
            raise AdapterError(
                "this model has no net for single samples: train it with --algorithm single_sample"
            )
        hidden, features = weights["trunk.weight"].shape
        if features != rows.shape[1]:
            raise AdapterError(
                f"the net for single samples reads {features} features, the model has {rows.shape[1]}: "
                "they come from different trainings"
            )
        net = filled(lambda: SampleInferenceNet(features, hidden), weights, rows)
        self.net = net.requires_grad_(False)

    def adapt(self, x: Tensor) -> Tensor:
        """Predict every image by the classifier it gives rise to."""
        z, _ = predict(self, x)
        head, draws = self.model.linear, self.settings.num_samples
        w = self.net(z, head)
        shape = (max(1, draws), 1, len(head.bias))
        if draws == 0:
            return generated_logits(z, w, z.new_zeros(shape))[0]
        noise = torch.randn(shape, generator=self.generator, device=z.device, dtype=z.dtype)
        return as_logits(generated_logits(z, w, noise).softmax(-1).mean(0))
