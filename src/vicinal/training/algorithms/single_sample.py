"""Single-sample generalization: model and net learn together to classify a domain from one image of it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.adapters.single_sample import NAME
from vicinal.data.domains import SourceDomain
from vicinal.data.episodes import Batch, split_meta
from vicinal.functional.generated import generated_kl, generated_logits
from vicinal.functional.labels import class_means
from vicinal.models.auxiliary import as_extras
from vicinal.models.classifier import Classifier
from vicinal.models.single_sample import SampleInferenceNet
from vicinal.training.config import TrainConfig
from vicinal.training.learner import ALGORITHMS, Learner, Stage, Terms
from vicinal.types import GaussianW, Head

# Weight of the KL, a sum over images, classes and features, by the authors' code; `kl_weight` multiplies it.
KL_WEIGHT = 1e-5


def single_sample_step(learner: Learner, batches: tuple[Batch, ...]) -> Terms:
    """Take one step on a split of the sources.

    L = CE(source classifier, meta-source) + E_p CE(meta-target) + E_q CE(meta-target) + beta KL[p || q]

    p: the classifiers generated from each meta-target image alone; q: the one from the class means of the
    meta-target batch by its true labels. In the authors' code too both classify and the KL is this way round.
    """
    config, model, net = learner.config, learner.model, learner.auxiliary
    assert isinstance(net, SampleInferenceNet)
    (x_source, y_source), (x, y) = batches
    source = F.cross_entropy(model(x_source), y_source, label_smoothing=config.label_smoothing)
    z, head = model.embed(x), Head(model.head.weight, model.head.bias)
    means, present = class_means(z, F.one_hot(y, len(head.bias)).to(z.dtype))
    p, q = net(z, head), net.of_domain(means, present, head)
    sample, domain = (drawn_cross_entropy(z, w, y, config, learner.noise) for w in (p, q))
    kl = config.kl_weight * KL_WEIGHT * generated_kl(p, q, present)
    learner.optimizer.zero_grad(set_to_none=True)
    (source + sample + domain + kl).backward()  # type: ignore[no-untyped-call]
    learner.optimizer.step()
    terms = {"source": source, "sample": sample, "domain": domain, "kl": kl}
    return {name: value.detach() for name, value in terms.items()}


def drawn_cross_entropy(
    z: Tensor, w: GaussianW, y: Tensor, config: TrainConfig, noise: torch.Generator
) -> Tensor:
    """Return the cross-entropy with the true classes, a mean over draws of w; no draws: under its mean."""
    shape = (max(1, config.num_samples), len(z), w.bias.shape[-1])
    drawn = torch.randn(shape, generator=noise, device=z.device, dtype=z.dtype)
    logits = generated_logits(z, w, drawn if config.num_samples else torch.zeros_like(drawn))
    return F.cross_entropy(logits.flatten(0, 1), y.repeat(shape[0]))


def make_net(model: Classifier, config: TrainConfig) -> SampleInferenceNet:
    """Return a net for the model's features; it changes no row yet."""
    return SampleInferenceNet(model.head.in_features)


def keep_net(learner: Learner, sources: Sequence[SourceDomain]) -> dict[str, Tensor]:
    """Return the net's weights under the names that the adapter looks for."""
    assert learner.auxiliary is not None
    return as_extras(NAME, learner.auxiliary)


SINGLE_SAMPLE = Stage(
    "single_sample",
    split_meta,
    single_sample_step,
    auxiliary=make_net,
    auxiliary_rate="phi_lr",
    finish=keep_net,
)
ALGORITHMS.register("single_sample")((SINGLE_SAMPLE,))
