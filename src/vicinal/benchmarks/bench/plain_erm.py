"""The plain PyTorch loop that vicinal's ERM step is held against, as a good engineer would write it today.

Nothing of vicinal is in it but the net itself: how vicinal runs its nets must not show here. cuDNN chooses
its kernels by its own rules, as it does in vicinal's steps: `cudnn.benchmark` would have it try them all, but
what it finds is kept for every case of the process, vicinal's too.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.benchmarks.bench.cases import Case, episode_batches, model_spec, train_config
from vicinal.benchmarks.bench.scale import Shape
from vicinal.benchmarks.bench.timing import Work
from vicinal.data.episodes import Batch
from vicinal.models.classifier import Classifier
from vicinal.training.config import TrainConfig
from vicinal.training.learner import ALGORITHMS
from vicinal.training.train import untrained

WARM_UP = 3  # steps before a capture, as torch's notes on CUDA graphs do it
Step = Callable[[Batch], None]
Net = Callable[[Tensor], Tensor]


class Plain(nn.Module):
    """The net of a classifier, run as it is: images in [0, 1] -> logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.features, self.head = model.features, model.head
        self.register_buffer("mean", model.mean)
        self.register_buffer("std", model.std)

    def embed(self, x: Tensor) -> Tensor:
        """Return z (N, d)."""
        z: Tensor = self.features((x - self.mean) / self.std)
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, C)."""
        logits: Tensor = self.head(self.embed(x))
        return logits


@dataclass(frozen=True)
class Loop:
    """How a plain loop runs its step."""

    half: bool = False  # autocast to bfloat16
    compiled: Literal["", "default", "reduce-overhead"] = ""  # by torch.compile, in this mode
    captured: bool = False  # the whole step, optimizer included, in one CUDA graph


def autocast(device: torch.device, half: bool) -> AbstractContextManager[Any]:
    """Return a block whose matrix products run in bfloat16, if asked."""
    # Without its cache: no weight is used twice in a pass, and a cache and a CUDA graph do not go together.
    return torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False)


def fused_adam(
    parameters: list[Tensor], config: TrainConfig, device: torch.device, capturable: bool = False
) -> torch.optim.Adam:
    """Return Adam, on a GPU in one kernel; one that can be captured reads its step size there."""
    lr = config.backbone_lr
    if device.type != "cuda":
        return torch.optim.Adam(parameters, lr=lr)
    # A number would be frozen into the graph, and no schedule could change it.
    rate = torch.tensor(lr, device=device) if capturable else lr
    return torch.optim.Adam(parameters, lr=rate, fused=True, capturable=capturable)


def placed(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its channels last where tensor cores like that."""
    if device.type != "cuda":
        return batch
    return Batch(batch.x.contiguous(memory_format=torch.channels_last), batch.y)


def erm_step(
    net: Net, optimizer: torch.optim.Optimizer, config: TrainConfig, half: bool, batch: Batch
) -> None:
    """Take a step of cross-entropy."""
    optimizer.zero_grad(set_to_none=True)
    with autocast(batch.x.device, half):
        loss = F.cross_entropy(net(batch.x), batch.y, label_smoothing=config.label_smoothing)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def plain_erm(shape: Shape, device: torch.device, loop: Loop) -> Work:
    """Return a step of cross-entropy on as many images as the two batches of an iteration."""
    config = train_config(shape)
    model = Plain(untrained(model_spec(shape), config, device)[0]).train()
    optimizer = fused_adam(list(model.parameters()), config, device, capturable=loop.captured)
    step: Step = partial(erm_step, net_of(model, loop), optimizer, config, loop.half)
    batch = placed(episode_batches(ALGORITHMS["erm"][0], shape, device)[0], device)
    if loop.captured:
        step = captured(step, optimizer, batch)
    return partial(step, batch)


def net_of(model: nn.Module, loop: Loop) -> Net:
    """Return what runs the net: itself, or its compiled code."""
    if not loop.compiled:
        return model
    # Shapes never change here; told so, the compiler need not find out.
    compiled = torch.compile(model, mode=loop.compiled, dynamic=False)
    return compiled if loop.compiled == "default" else partial(_in_a_new_step, compiled)


def _in_a_new_step(net: Net, x: Tensor) -> Tensor:
    """Return what the net returns, in memory that the compiler's graphs may take from the last step."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    return net(x)


@dataclass(frozen=True, eq=False)
class Captured:
    """A step captured whole in one CUDA graph: a call copies its batch in and replays it.

    The copy is part of it: a loop's batches lie in new memory each time.
    """

    graph: torch.cuda.CUDAGraph
    held: Batch  # the memory that the graph reads its batch from
    step: Step  # not called again, but the graph reads and writes its net and optimizer: they must live

    def __call__(self, batch: Batch) -> None:
        """Take a step on a batch."""
        self.held.x.copy_(batch.x)
        self.held.y.copy_(batch.y)
        self.graph.replay()


def captured(step: Step, optimizer: torch.optim.Optimizer, batch: Batch) -> Captured:
    """Return a step captured, after some runs of it on the batch."""
    held = Batch(batch.x.clone(), batch.y.clone())
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            step(held)
    torch.cuda.current_stream().wait_stream(aside)
    optimizer.zero_grad(set_to_none=True)  # so that the graph makes gradients in memory of its own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        step(held)
    return Captured(graph, held, step)


def plain_case(name: str, shape: Shape, device: torch.device, loop: Loop, same_as: str = "") -> Case:
    """Return a plain loop as a case; `same_as` names the one whose arithmetic it does."""
    # The compiler's graphs empty the scratch memory of cuBLAS, which graphs captured before go on using.
    early = loop.compiled == "reduce-overhead"
    return Case(name, shape, 2 * shape.batch, partial(plain_erm, shape, device, loop), same_as, early)
