"""What vicinal's iteration is held against: the same meta-learning by autograd alone.

Written as a good engineer would write it today, with nothing of vicinal in it but the nets themselves and the
formulas of the labels: how vicinal runs its nets must not show here.
"""

from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from vicinal.benchmarks.bench.cases import SEED, Case, episode_batches, model_spec, train_config
from vicinal.benchmarks.bench.plain_erm import Plain, autocast, erm_step, fused_adam, placed
from vicinal.benchmarks.bench.scale import Shape
from vicinal.benchmarks.bench.timing import Work
from vicinal.functional.losses import label_cross_entropy, soft_cross_entropy
from vicinal.functional.updates import sgd_step
from vicinal.models.inference import InferenceNet
from vicinal.training.config import TrainConfig
from vicinal.training.learner import ALGORITHMS
from vicinal.training.meta import MetaGradients, posterior_labels
from vicinal.training.train import untrained
from vicinal.types import Head


class WithFeatures(Plain):
    """The same net, telling its features too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return z (N, d) and logits (N, C)."""
        z = self.embed(x)
        return z, self.head(z)


def unrolled_gradients(
    model: WithFeatures,
    phi: InferenceNet,
    x: Tensor,
    y: Tensor,
    config: TrainConfig,
    noise: torch.Generator,
    *,
    exact: bool,
    half: bool = False,
) -> MetaGradients:
    """Return the gradients of theta and phi through an unrolled inner step, by autograd alone.

    `exact` builds the graph of the inner gradient and differentiates through it; else that gradient counts
    as a constant, and theta's is taken at the updated parameters.
    """
    theta = {name: value.detach().requires_grad_() for name, value in model.named_parameters()}
    buffers, dtype = dict(model.named_buffers()), x.dtype

    def run(at: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with autocast(x.device, half):
            # Buffers are cloned, or the passes would write BatchNorm's.
            state = {**at, **{name: value.clone() for name, value in buffers.items()}}
            z, logits = functional_call(model, state, (x,))
        return z.to(dtype), logits.to(dtype)

    z, logits = run(theta)
    head = Head(theta["head.weight"].detach(), theta["head.bias"].detach())
    labels = posterior_labels(phi, z.detach(), logits, y, head, config, noise)
    inner = soft_cross_entropy(logits, labels.y_hat if exact else labels.y_hat.detach())
    gradient = torch.autograd.grad(inner, list(theta.values()), create_graph=exact)
    stepped = sgd_step(theta, dict(zip(theta, gradient, strict=True)), config.adapt_lr)
    outer = F.cross_entropy(run(stepped)[1], y, label_smoothing=config.label_smoothing)
    total = outer + label_cross_entropy(labels.y_hat, y) + config.kl_weight * labels.kl
    wanted = [*theta.values(), *phi.parameters()]
    grads = torch.autograd.grad(total, wanted, allow_unused=True)
    filled = [torch.zeros_like(v) if g is None else g for v, g in zip(wanted, grads, strict=True)]
    names = [name for name, _ in phi.named_parameters()]
    return MetaGradients(
        dict(zip(theta, filled, strict=False)), dict(zip(names, filled[len(theta) :], strict=True))
    )


def laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a gradient in the memory layout of its parameter, which fused optimizers ask for."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def unrolled_step(shape: Shape, device: torch.device, exact: bool, half: bool) -> Work:
    """Return an iteration of meta-learning as vicinal's, by autograd alone."""
    config = train_config(shape)
    classifier, phi = untrained(model_spec(shape), config, device)
    model = WithFeatures(classifier).train()
    optimizer = fused_adam([*model.parameters(), *phi.parameters()], config, device)
    noise = torch.Generator(device=device).manual_seed(SEED)
    batches = episode_batches(ALGORITHMS["meta"][0], shape, device)
    source, (x, y) = (placed(batch, device) for batch in batches)

    def step() -> None:
        erm_step(lambda images: model(images)[1], optimizer, config, half, source)
        found = unrolled_gradients(model, phi, x, y, config, noise, exact=exact, half=half)
        for module, gradients in ((model, found.theta), (phi, found.phi)):
            for name, parameter in module.named_parameters():
                parameter.grad = laid_out(gradients[name], parameter)
        optimizer.step()

    return step


def unrolled_case(name: str, shape: Shape, device: torch.device, exact: bool) -> Case:
    """Return unrolled meta-learning as a case, in bfloat16 where there are tensor cores."""
    half = device.type == "cuda"
    return Case(name, shape, 2 * shape.batch, partial(unrolled_step, shape, device, exact, half))
