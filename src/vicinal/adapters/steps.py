"""A batch's updates for methods whose step is more than one loss and one optimizer step."""

from collections.abc import Callable

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.passes import look, predict

Step = Callable[[Tensor], Tensor]


def step_and_predict(adapter: Adapter, x: Tensor, step: Step) -> Tensor:
    """Take all steps of a batch and return the logits that the settings ask for.

    `step` updates the model once and returns the logits of its first pass. Before the update means: before
    the last one, as the methods' own code has it.
    """
    before = adapter.settings.predict == "before"
    # Where the pass whose gradient is taken is also the one that would predict, it is not run twice.
    apart = before and not (adapter.settings.augment is None and adapter.norm.one_pass(len(x)))
    for _ in range(adapter.settings.steps - 1):
        step(x)
    told = predict(adapter, x)[1] if apart else None
    logits = step(x)
    if before:
        return logits if told is None else told
    return predict(adapter, x)[1]


def update_view(adapter: Adapter, x: Tensor) -> Tensor:
    """Return what an update runs on: the batch, or its augmented view."""
    augment = adapter.settings.augment
    if augment is None:
        return x
    if not adapter.norm.observed(len(x)):
        look(adapter, x)  # what the update moves is measured on the clean view, before and after
    return augment(x, adapter.generator)


def logits_on(adapter: Adapter, view: Tensor) -> Tensor:
    """Return the logits of a view, with their graph, on the statistics that updates run on."""
    with adapter.norm.updating(len(view)):
        logits: Tensor = adapter.model(view)
    return logits


def labelling(adapter: Adapter, x: Tensor, logits: Tensor) -> Tensor:
    """Return the logits that labels come from: the update's own, or the clean view's where it has another."""
    return logits.detach() if adapter.settings.augment is None else look(adapter, x)[1]
