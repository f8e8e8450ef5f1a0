"""A bounded store of an adapter's states; tensors that have not left the source are not stored."""

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter


class Snapshot(NamedTuple):
    """The part of an adapter's state that differs from the source, and when it was taken."""

    step: int
    scale: float  # of the step size at that time
    changed: dict[str, Any]


def take(adapter: Adapter, step: int, scale: float) -> Snapshot:
    """Return a snapshot of the adapter as it is, on its device."""
    initial, changed = adapter.initial_state, {}
    values = chain(
        adapter.named_parameters(remove_duplicate=False), adapter.named_buffers(remove_duplicate=False)
    )
    for name, value in values:
        if name in initial and (value.requires_grad or not torch.equal(value, initial[name])):
            changed[name] = value.detach().clone()
    for name, module in adapter.named_modules():
        key = f"{name}." if name else ""
        if f"{key}_extra_state" in initial:
            changed[f"{key}_extra_state"] = module.get_extra_state()  # a copy by itself
    return Snapshot(step, scale, changed)


def restore(adapter: Adapter, snapshot: Snapshot) -> None:
    """Bring an adapter back to where it was when the snapshot was taken."""
    adapter.load_state_dict({**adapter.initial_state, **snapshot.changed})


def scale_step(adapter: Adapter, factor: float) -> None:
    """Multiply the adapter's step size."""
    if adapter.optimizer is not None:
        for group in adapter.optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        adapter.recorder.forget()  # a recording has the old one


@torch.no_grad()
def drift(adapter: Adapter, source: dict[str, Tensor]) -> float:
    """Return how far the updated parameters are from the source's, relative to the length of those."""
    pairs = [
        (value, source[name])
        for name, value in adapter.model.named_parameters()
        if value.requires_grad and name in source
    ]
    if not pairs or adapter.optimizer is None:
        return 0.0
    now, then = (list(part) for part in zip(*pairs, strict=True))
    moved = torch.stack(torch._foreach_norm(torch._foreach_sub(now, then))).norm()
    return float(moved / torch.stack(torch._foreach_norm(then)).norm())
