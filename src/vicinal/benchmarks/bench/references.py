"""What vicinal's steps are held against: a plain PyTorch loop, and meta-learning by double backward.

Each is written as a good engineer would write it today, with nothing of vicinal in it but the nets
themselves and the formulas of the labels: how vicinal runs its nets must not show here.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from vicinal.benchmarks.bench.cases import (
    SEED,
    Case,
    episode_batches,
    model_spec,
    train_config,
)
from vicinal.benchmarks.bench.scale import Shape
from vicinal.benchmarks.bench.timing import Work
from vicinal.data.episodes import Batch
from vicinal.functional.losses import label_cross_entropy, soft_cross_entropy
from vicinal.functional.updates import sgd_step
from vicinal.models.classifier import Classifier
from vicinal.models.inference import InferenceNet
from vicinal.training.config import TrainConfig
from vicinal.training.learner import ALGORITHMS
from vicinal.training.meta import MetaGradients, posterior_labels
from vicinal.training.train import untrained
from vicinal.types import Head


class Plain(nn.Module):
    """The net of a classifier, run as it is: images in [0, 1] -> features and logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.features, self.head = model.features, model.head
        self.register_buffer("mean", model.mean)
        self.register_buffer("std", model.std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return z (N, d) and logits (N, C)."""
        z = self.features((x - self.mean) / self.std)
        return z, self.head(z)


def autocast(device: torch.device, half: bool) -> AbstractContextManager[Any]:
    """Return a block whose matrix products run in bfloat16, if asked."""
    return torch.autocast(device.type, torch.bfloat16, enabled=half)


def fused_adam(parameters: list[Tensor], config: TrainConfig, device: torch.device) -> torch.optim.Adam:
    """Return Adam in one kernel."""
    return torch.optim.Adam(parameters, lr=config.backbone_lr, fused=device.type == "cuda")


def placed(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its channels last where tensor cores like that."""
    if device.type != "cuda":
        return batch
    return Batch(batch.x.contiguous(memory_format=torch.channels_last), batch.y)


def plain_erm(shape: Shape, device: torch.device, half: bool, compiled: bool) -> Work:
    """Return a step of cross-entropy on as many images as the two batches of an iteration."""
    config = train_config(shape)
    model = Plain(untrained(model_spec(shape), config, device)[0]).train()
    optimizer = fused_adam(list(model.parameters()), config, device)
    net = torch.compile(model) if compiled else model
    batch = placed(episode_batches(ALGORITHMS["erm"][0], shape, device)[0], device)
    return partial(erm_step, net, optimizer, batch, config, half)


def erm_step(
    net: Callable[[Tensor], Any],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: TrainConfig,
    half: bool,
) -> None:
    """Take a step of cross-entropy."""
    with autocast(batch.x.device, half):
        loss = F.cross_entropy(net(batch.x)[1], batch.y, label_smoothing=config.label_smoothing)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def plain_case(name: str, shape: Shape, device: torch.device, half: bool) -> Case:
    """Return the plain loop as a case."""
    return Case(name, shape, 2 * shape.batch, partial(plain_erm, shape, device, half, False))


def compiled_case(name: str, shape: Shape, device: torch.device, same_as: str) -> Case:
    """Return the plain loop on a compiled net, in half precision."""
    return Case(name, shape, 2 * shape.batch, partial(plain_erm, shape, device, True, True), same_as)


def unrolled_gradients(
    model: Plain,
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
    model = Plain(classifier).train()
    optimizer = fused_adam([*model.parameters(), *phi.parameters()], config, device)
    noise = torch.Generator(device=device).manual_seed(SEED)
    batches = episode_batches(ALGORITHMS["meta"][0], shape, device)
    source, (x, y) = (placed(batch, device) for batch in batches)

    def step() -> None:
        erm_step(model, optimizer, source, config, half)
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
