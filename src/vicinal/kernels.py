"""CUDA kernels from source text, compiled by torch at run time (NVRTC) where that can be had."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

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
