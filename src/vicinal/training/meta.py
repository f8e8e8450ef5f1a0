"""Algorithm 1: the three stages of one iteration, each a function of all it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.functional.inference import posterior, prior
from vicinal.functional.labels import draw_one_hot, hard_labels, neighbor_labels
from vicinal.functional.losses import gaussian_kl, label_cross_entropy, soft_cross_entropy
from vicinal.functional.updates import second_order, sgd_step
from vicinal.models.classifier import Classifier
from vicinal.models.inference import InferenceNet
from vicinal.training.config import TrainConfig
from vicinal.types import Head

Tensors = Mapping[str, Tensor]


class NeighborBatch(NamedTuple):
    """Labels of one batch, made group by group, and the KL between posterior and prior."""

    y_hat: Tensor  # (N, C)
    kl: Tensor


@dataclass(frozen=True)
class Generalized:
    """What the meta-generalization stage makes."""

    theta_meta_source: dict[str, Tensor]
    theta_generalized: dict[str, Tensor]
    labels: NeighborBatch
    y_inner: Tensor  # the labels the inner step took: y_hat, or one-hot draws of it
    buffers: dict[str, Tensor]


class MetaTerms(NamedTuple):
    """L_meta of Eq. (10), term by term, and the extra cross-entropy of the labels."""

    classify: Tensor
    label: Tensor
    kl: Tensor


class MetaGradients(NamedTuple):
    """Gradients of one iteration, by parameter name."""

    theta: dict[str, Tensor]
    phi: dict[str, Tensor]


def features_and_logits(
    model: Classifier, theta: Tensors, buffers: Tensors, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return z and logits under parameters `theta`, leaving the model and the given buffers untouched.

    Buffers are passed in and cloned: `functional_call` with parameters alone still writes BatchNorm's.
    """
    prefix = "features."
    state = {
        name.removeprefix(prefix): value.clone() if name in buffers else value
        for name, value in {**theta, **buffers}.items()
        if name.startswith(prefix)
    }
    z = model.embed(x, state)
    return z, F.linear(z, theta["head.weight"], theta["head.bias"])


def meta_source_step(
    model: Classifier, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Take one optimizer step of cross-entropy on the meta-source batch; the model then is theta_s'."""
    loss = F.cross_entropy(model(x), y, label_smoothing=label_smoothing)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def posterior_labels(
    phi: InferenceNet,
    z: Tensor,
    logits: Tensor,
    y: Tensor,
    head: Head,
    config: TrainConfig,
    generator: torch.Generator,
) -> NeighborBatch:
    """Return y_hat from draws of the posterior, and KL[q || p], over groups of the test-time batch size.

    phi must meet in training the small, class-incomplete groups it meets at test time.
    """
    y_true = F.one_hot(y, logits.shape[-1]).to(z.dtype)
    y_pseudo = hard_labels(logits.detach())
    y_hat, kls = [], []
    for group in torch.split(torch.arange(len(z), device=z.device), config.group_size):
        p = prior(phi, z[group], y_pseudo[group], head)
        q = posterior(phi, z[group], y_true[group], head)
        present = (y_pseudo[group].sum(0) > 0) & (y_true[group].sum(0) > 0)
        kls.append(gaussian_kl(q, p, present))
        y_hat.append(neighbor_labels(z[group], q, config.num_samples, generator))
    return NeighborBatch(torch.cat(y_hat), torch.stack(kls).mean())


def meta_generalization_step(
    model: Classifier,
    phi: InferenceNet,
    x: Tensor,
    y: Tensor,
    config: TrainConfig,
    generator: torch.Generator,
) -> Generalized:
    """Return theta_t'* after one plain step of CE(f(x), y_hat), y_hat from the posterior; Eq. (8).

    Labels are cut off from the features unless `joint_features`: they then depend on phi alone.
    """
    theta = {name: value.detach().requires_grad_() for name, value in model.named_parameters()}
    buffers = dict(model.named_buffers())
    z, logits = features_and_logits(model, theta, buffers, x)
    head = Head(theta["head.weight"], theta["head.bias"])
    if not config.joint_features:
        labels = posterior_labels(
            phi, z.detach(), logits, y, Head(*(t.detach() for t in head)), config, generator
        )
    else:
        labels = posterior_labels(phi, z, logits, y, head, config, generator)
    y_inner = labels.y_hat.detach()
    if config.draw_labels:
        y_inner = draw_one_hot(y_inner, 1, generator)
    inner = soft_cross_entropy(logits, y_inner)
    keep = config.joint_features
    gradient = torch.autograd.grad(inner, list(theta.values()), retain_graph=keep, allow_unused=True)
    stepped = sgd_step(theta, _filled(theta, gradient), config.adapt_lr)
    generalized = {name: value.detach() for name, value in stepped.items()}
    return Generalized(theta, generalized, labels, y_inner, buffers)


def meta_target_loss(
    model: Classifier, stage: Generalized, theta: Tensors, x: Tensor, y: Tensor, config: TrainConfig
) -> MetaTerms:
    """Return the terms of L_meta at theta_t'* and the cross-entropy of the labels; Eq. (10)."""
    _, logits = features_and_logits(model, theta, stage.buffers, x)
    classify = F.cross_entropy(logits, y, label_smoothing=config.label_smoothing)
    return MetaTerms(classify, label_cross_entropy(stage.labels.y_hat, y), config.kl_weight * stage.labels.kl)


def meta_gradients(
    model: Classifier, phi: InferenceNet, stage: Generalized, x: Tensor, y: Tensor, config: TrainConfig
) -> tuple[MetaGradients, MetaTerms]:
    """Return what moves theta and phi in the meta-target stage, and the terms of the loss.

    theta: the gradient of L_meta taken at theta_t'*, applied to theta_s'. phi: the gradient of the label loss
    plus L_meta (Algorithm 1 prints a minus there, a typo). Exact second order adds what flows through the
    inner step: - lambda_1 H v to theta, and dL/dy_hat through the labels to phi.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in stage.theta_generalized.items()}
    terms = meta_target_loss(model, stage, leaves, x, y, config)
    outer = torch.autograd.grad(terms.classify, list(leaves.values()), allow_unused=True)
    v = _filled(leaves, outer)
    objective = terms.label + terms.kl
    theta = v
    if config.second_order:
        run = partial(_logits_at, model, stage.buffers, x)
        # With draws, the gradient of a drawn label is handed to the probabilities it was drawn from.
        y_hat = stage.labels.y_hat
        extra = second_order(
            run, stage.theta_meta_source, stage.y_inner, v, config.adapt_lr, config.difference
        )
        theta = {name: value - config.adapt_lr * extra.hessian_v[name] for name, value in v.items()}
        objective = objective + (y_hat * extra.label_gradient).sum()
    wanted = dict(phi.named_parameters())
    reached = dict(stage.theta_meta_source) if config.joint_features else {}
    grads = torch.autograd.grad(objective, [*wanted.values(), *reached.values()], allow_unused=True)
    by_phi, by_theta = grads[: len(wanted)], grads[len(wanted) :]
    for name, grad in zip(reached, by_theta, strict=True):
        if grad is not None:
            theta = {**theta, name: theta[name] + grad}
    return MetaGradients(theta, _filled(wanted, by_phi)), terms


def _filled(parameters: Tensors, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return gradients by name, zeros for a parameter that the loss does not reach."""
    pairs = zip(parameters.items(), gradients, strict=True)
    return {name: torch.zeros_like(value) if grad is None else grad for (name, value), grad in pairs}


def _logits_at(model: Classifier, buffers: Tensors, x: Tensor, theta: Tensors) -> Tensor:
    return features_and_logits(model, theta, buffers, x)[1]
