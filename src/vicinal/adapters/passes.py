"""The passes most methods are made of: update by a loss, predict, or both with labels as targets."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from vicinal.adapters.contract import Adapter
from vicinal.errors import AdapterError
from vicinal.functional.losses import soft_cross_entropy
from vicinal.graphs import Branch, adam_options

Loss = Callable[[Tensor, Tensor], Tensor]
Labels = Callable[[Tensor, Tensor], Tensor]
NORM_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d)


def optimizer_for(adapter: Adapter) -> torch.optim.Optimizer:
    """Return the optimizer that the settings name, on the parameters they name; the others stay."""
    settings, chosen = adapter.settings, list(chosen_parameters(adapter.model, adapter.settings.parameters))
    if not chosen:
        raise AdapterError(
            f"this model has no parameters of kind '{settings.parameters}': choose others with parameters="
        )
    # Nothing is gained by gradients that nobody applies.
    adapter.model.requires_grad_(False)
    for parameter in chosen:
        parameter.requires_grad_(True)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(chosen, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.Adam(chosen, lr=settings.lr, **adam_options(chosen[0].device))


def chosen_parameters(model: nn.Module, kind: str) -> Iterator[nn.Parameter]:
    """Yield all parameters, those of normalization layers, those of the features, or those of the head."""
    if kind == "norm":
        for layer in model.modules():
            if isinstance(layer, NORM_LAYERS):
                yield from layer.parameters(recurse=False)
        return
    head = {id(parameter) for parameter in model.head_parameters()}  # type: ignore[operator]
    for parameter in model.parameters():
        if kind == "all" or (id(parameter) in head) == (kind == "head"):
            yield parameter


def update(adapter: Adapter, x: Tensor, loss: Loss) -> Tensor:
    """Take one step of loss(z, logits) on the batch, or on its augmented view; return its logits."""
    assert adapter.optimizer is not None
    augment = adapter.settings.augment
    if augment is not None and not adapter.norm.observed(len(x)):
        look(adapter, x)  # what the update moves is measured on the clean view, before and after
    view = x if augment is None else augment(x, adapter.generator)
    with Branch(x.device) as branch:  # a dozen kernels on single numbers
        share = _share_of_step(adapter)
    with adapter.norm.updating(len(x)):
        z, logits = adapter.model.features_and_logits(view)
    adapter.optimizer.zero_grad(set_to_none=True)
    loss(z, logits).backward()  # type: ignore[no-untyped-call]
    branch.join()
    _take(adapter, share)
    return logits.detach()


@torch.no_grad()
def take_step(adapter: Adapter) -> None:
    """Take the optimizer's step, then go back toward the source: theta <- theta + pull (theta_s - theta).

    With steps of about `lr` a parameter then stays within lr / pull of the source, however long the stream.
    The step has the share of its length that the adapter says, from rest that of Adam's momentum besides.
    """
    _take(adapter, _share_of_step(adapter))


@torch.no_grad()
def _share_of_step(adapter: Adapter) -> Tensor | None:
    share = adapter.step_share()
    if not adapter.settings.from_rest or adapter.settings.optimizer != "adam":  # SGD corrects nothing
        return share
    assert adapter.optimizer is not None
    gained = _momentum_gained(adapter.optimizer)
    return gained if share is None else share * gained


@torch.no_grad()
def _take(adapter: Adapter, share: Tensor | None) -> None:
    assert adapter.optimizer is not None
    if share is None:
        adapter.optimizer.step()
    else:
        _shortened_step(adapter.optimizer, share)
    if adapter.settings.pull:
        updated = {id(value) for group in adapter.optimizer.param_groups for value in group["params"]}
        moving = {name: value for name, value in adapter.named_parameters() if id(value) in updated}
        home = [adapter.initial_state[name] for name in moving]
        torch._foreach_lerp_(list(moving.values()), home, adapter.settings.pull)
    first = adapter.optimizer.param_groups[0]["params"][0]
    if any(first is value for value in adapter.model.parameters()):  # not of heads beside the model
        adapter.norm.moved()


def _momentum_gained(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return 1 - beta_1^t, how far Adam's momentum has grown at step t: what Adam divides it by."""
    group = optimizer.param_groups[0]
    steps = (entry["step"] for entry in optimizer.state.values() if "step" in entry)
    before: Tensor = next(steps, group["params"][0].new_zeros(()))  # on the device: a recorded step counts on
    gained: Tensor = 1 - group["betas"][0] ** (before.double() + 1)
    return gained


def _shortened_step(optimizer: torch.optim.Optimizer, share: Tensor) -> None:
    """Take a share of an optimizer's step; a recorded step can take another each time.

    Fused optimizers read a step size that is a tensor where it lies. For others theta + share (step(theta) -
    theta): the same, at four more passes over all parameters.
    """
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups):
        sizes = [group["lr"] for group in groups]
        try:
            for group, lr in zip(groups, sizes, strict=True):
                # The kernels read single precision, whatever the weights are.
                group["lr"] = (lr * share).float()
            optimizer.step()
        finally:
            for group, lr in zip(groups, sizes, strict=True):
                group["lr"] = lr
        return
    values = [value for group in groups for value in group["params"]]
    before = torch._foreach_mul(values, 1.0)
    optimizer.step()
    torch._foreach_sub_(values, before)
    torch._foreach_mul_(values, share.to(values[0].dtype))
    torch._foreach_add_(values, before)


def update_and_predict(adapter: Adapter, x: Tensor, loss: Loss) -> Tensor:
    """Take all updates of a batch and return the logits that the settings ask for.

    Before the update means: before the last one, as the methods' own code has it.
    """
    logits = None
    for step in range(adapter.settings.steps):
        last = step == adapter.settings.steps - 1
        if last and adapter.settings.predict == "before" and not _same_pass(adapter, x):
            logits = predict(adapter, x)[1]
            update(adapter, x, loss)
        else:
            logits = update(adapter, x, loss)
    assert logits is not None
    return logits if adapter.settings.predict == "before" else predict(adapter, x)[1]


def _same_pass(adapter: Adapter, x: Tensor) -> bool:
    """Say whether the pass whose gradient is taken is also the one that would predict."""
    return adapter.settings.augment is None and adapter.norm.one_pass(len(x))


@torch.no_grad()
def look(adapter: Adapter, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and logits of the clean view on the statistics that updates run on."""
    with adapter.norm.updating(len(x)):
        return adapter.model.features_and_logits(x)


@torch.no_grad()
def predict(adapter: Adapter, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and logits on the statistics that predictions run on."""
    if adapter.told is not None:
        z, logits = adapter.told
    else:
        with adapter.norm.predicting(len(x)):
            z, logits = adapter.model.features_and_logits(x)
    adapter.show(z, logits, adapter.model)
    return z, logits


def train_on_labels(adapter: Adapter, x: Tensor, labels: Labels) -> None:
    """Update by cross-entropy with labels(z, logits) of the clean view; Algorithm 2, lines 4 and 5."""
    for _ in range(adapter.settings.steps):
        # Without augmentation the view is the clean one and its own pass gives the labels: no second pass.
        clean = None if adapter.settings.augment is None else labels(*look(adapter, x))

        def loss(z: Tensor, logits: Tensor, y_hat: Tensor | None = clean) -> Tensor:
            with torch.no_grad():
                y = labels(z, logits) if y_hat is None else y_hat
            return soft_cross_entropy(logits, y)

        update(adapter, x, loss)


def as_logits(y_hat: Tensor) -> Tensor:
    """Return labels as logits: their logarithm, kept finite."""
    return y_hat.clamp_min(torch.finfo(y_hat.dtype).tiny).log()
