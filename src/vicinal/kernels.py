"""CUDA kernels from source text, compiled by torch at run time (NVRTC) where that can be had."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from threading import local
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]  # of a grid, a block and a list of arguments


def compiled(text: str, names: Sequence[str], device: int) -> list[Kernel] | None:
    """Return the named kernels for a device; None where they cannot be compiled: there is another way."""
    # Not yet a public call of torch: whatever keeps it from working, nobody is to notice.
    try:
        with torch.cuda.device(device):
            return [torch.cuda._compile_kernel(text, name) for name in names]
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError):
        return None


def with_constants(text: str, constants: Mapping[str, Any]) -> str:
    """Return a source with names defined before it."""
    return "".join(f"#define {name} {value}\n" for name, value in constants.items()) + text


def suited(*values: Tensor, device: str = "cuda") -> bool:
    """Say whether tensors are what the kernels take: single precision, in one piece, on one device."""
    return all(
        value.device == values[0].device
        and value.device.type == device
        and value.dtype == torch.float32
        and value.is_contiguous()
        for value in values
    )


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a block that starts kernels on a device, which need not be the current one."""
    if device.type != "cuda":
        return nullcontext()
    _bind(device)
    return torch.cuda.device(device)


_bound = local()


def _bind(device: torch.device) -> None:
    """Give this thread the device's context, once.

    What torch itself starts does so unasked, what is started here does not; and gradients are taken in a
    thread where nothing may have been started yet.
    """
    known: set[torch.device] = _bound.__dict__.setdefault("devices", set())
    if device not in known:
        torch.zeros((), device=device)
        known.add(device)


@cache
def constant(value: float, device: torch.device) -> Tensor:
    """Return a number where kernels read it; versions of torch pass bare ones in different ways."""
    return torch.tensor(value, device=device, dtype=torch.float32)
