"""Meta-generalization: Algorithm 1 of the paper, the default."""

from torch import Tensor, nn

from vicinal.data.episodes import Batch, split_meta
from vicinal.training.learner import ALGORITHMS, Learner, Stage, Terms
from vicinal.training.meta import meta_generalization_step, meta_gradients, meta_source_step


def meta_step(learner: Learner, batches: tuple[Batch, ...]) -> Terms:
    """Simulate training, generalization and test on one split of the sources, and learn from it."""
    config, model, phi = learner.config, learner.model, learner.phi
    assert phi is not None
    (x_source, y_source), (x, y) = batches

    source = meta_source_step(model, learner.optimizer, x_source, y_source, config.label_smoothing)
    stage = meta_generalization_step(model, phi, x, y, config, learner.noise)
    gradients, terms = meta_gradients(model, phi, stage, x, y, config)

    _hand_over(model, gradients.theta)
    _hand_over(phi, gradients.phi)
    learner.optimizer.step()
    return {"source": source, **{name: value.detach() for name, value in terms._asdict().items()}}


def _hand_over(module: nn.Module, gradients: dict[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():
        parameter.grad = gradients[name]


META = Stage("meta", split_meta, meta_step, uses_phi=True)
ALGORITHMS.register("meta")((META,))
