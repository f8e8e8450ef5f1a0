"""An estimate from below of a step's time: its products at the rate of a large one, its bytes at a copy's.

Counted are matrix products and convolutions, each reading its inputs and writing its output once, and one
pass of each optimizer step over the parameters and what it keeps of them. All else (normalization,
activation, loss) could in principle be done on the way. It is an estimate and no bound: products are counted
as they are defined, and an algorithm that multiplies less (Winograd) or keeps what lies between neighbouring
convolutions on the chip can take less time.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vicinal.benchmarks.bench.timing import Now, seconds

TRIES = 5  # of which the fastest counts: a rate is what the machine can do
MATRIX = {"cpu": 1024, "cuda": 8192}
COPIED = {"cpu": 1 << 26, "cuda": 1 << 30}  # bytes
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Count:
    """What a step does, whoever does it."""

    flops: int = 0
    bytes: int = 0
    by_dtype: Counter[str] = field(default_factory=Counter)  # flops

    @property
    def dtype(self) -> str:
        """The number format most of the arithmetic is done in."""
        return self.by_dtype.most_common(1)[0][0] if self.by_dtype else "float32"


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds every matrix product and convolution to a count."""

    def __init__(self, count: Count) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        rule = flop_registry.get(func._overloadpacket)
        if rule is not None:
            flops = int(rule(*args, **kwargs, out_val=made))
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            tensors = given + [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
            self._count.flops += flops
            self._count.bytes += sum(tensor.nbytes for tensor in tensors)
            self._count.by_dtype[str(given[0].dtype).removeprefix("torch.")] += flops
        return made


@contextmanager
def counting() -> Iterator[Count]:
    """Count what the block computes, backward passes and optimizer steps included."""
    count = Count()

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        count.bytes += optimizer_bytes(optimizer)

    handle = register_optimizer_step_post_hook(stepped)
    try:
        with _Watch(count):
            yield count
    finally:
        handle.remove()


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return what a step reads (parameter, gradient, state) and writes (parameter, state)."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in (p for p in group["params"] if p.grad is not None):
            kept = [v for v in optimizer.state[parameter].values() if _like(v, parameter)]
            total += parameter.nbytes * (3 + 2 * len(kept))
    return total


def _like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def precision_of(count: Count, device: torch.device) -> str:
    """Return how a device multiplies numbers of the count's format."""
    rounded = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    return "tf32" if count.dtype == "float32" and rounded else count.dtype


@dataclass(frozen=True)
class Rates:
    """What a machine was measured to do in a second: operations by precision, bytes read and written."""

    flops: dict[str, float]
    bytes: float

    def floor(self, count: Count, precision: str) -> tuple[float, float]:
        """Return seconds of a count's arithmetic and of its bytes; the larger is the floor."""
        return count.flops / self.flops[precision], count.bytes / self.bytes


def measured_rates(device: torch.device, now: Now = time.perf_counter) -> Rates:
    """Return the rates of a device: the fastest of some tries at a large matrix product and a large copy."""
    # A CPU without units for it takes seconds to tell its rate in bfloat16, in which nothing runs there.
    kinds = ("float32", "bfloat16", "tf32") if device.type == "cuda" else ("float32",)
    return Rates({kind: _matrix_rate(kind, device, now) for kind in kinds}, _copy_rate(device, now))


def _matrix_rate(precision: str, device: torch.device, now: Now) -> float:
    size, before = MATRIX[device.type], torch.get_float32_matmul_precision()
    a, b = (torch.randn(size, size, device=device).to(DTYPES[precision]) for _ in range(2))
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        return 2 * size**3 / _fastest(lambda: a @ b, device, now)
    finally:
        torch.set_float32_matmul_precision(before)


def _copy_rate(device: torch.device, now: Now) -> float:
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: target.copy_(source), device, now)


def _fastest(work: Callable[[], object], device: torch.device, now: Now) -> float:
    seconds(work, device, 2, now)
    return min(seconds(work, device, 3 if device.type == "cuda" else 1, now) for _ in range(TRIES))
