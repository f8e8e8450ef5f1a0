"""The passes most methods are made of: update by a loss, predict, or both with labels as targets."""

from collections.abc import Callable

import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.functional.losses import soft_cross_entropy

Loss = Callable[[Tensor, Tensor], Tensor]
Labels = Callable[[Tensor, Tensor], Tensor]


def all_parameters(adapter: Adapter) -> torch.optim.Optimizer:
    """Return the paper's test-time optimizer: Adam on every parameter of the model."""
    return torch.optim.Adam(adapter.model.parameters(), lr=adapter.settings.lr)


def update(adapter: Adapter, x: Tensor, loss: Loss) -> None:
    """Take one optimizer step of loss(z, logits) on the batch, or on its augmented view."""
    assert adapter.optimizer is not None
    augment = adapter.settings.augment
    if augment is not None and not adapter.norm.observed:
        look(adapter, x)  # what the update moves is measured on the clean view, before and after
    view = x if augment is None else augment(x, adapter.generator)
    with adapter.norm.updating(len(x)):
        z, logits = adapter.model.features_and_logits(view)
    adapter.optimizer.zero_grad(set_to_none=True)
    loss(z, logits).backward()  # type: ignore[no-untyped-call]
    adapter.optimizer.step()


@torch.no_grad()
def look(adapter: Adapter, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and logits of the clean view on the statistics that updates run on."""
    with adapter.norm.updating(len(x)):
        return adapter.model.features_and_logits(x)


@torch.no_grad()
def predict(adapter: Adapter, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and logits on the statistics that predictions run on."""
    adapter.norm.settle(adapter.model, x)
    with adapter.norm.predicting(len(x)):
        z, logits = adapter.model.features_and_logits(x)
    if adapter.observer is not None:
        adapter.observer(z, logits, adapter.model.linear)
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
