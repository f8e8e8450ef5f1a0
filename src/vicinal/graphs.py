"""Steps recorded as CUDA graphs: hundreds of small kernels that one call starts.

On small images and small batches a GPU waits for Python: starting the kernels of a step takes several times
as long as running them. A step that does the same work on every batch of a shape is recorded once and
replayed. Everywhere but on a GPU, and where a step refuses to be recorded, it runs as it is written.
"""

import copy
import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

# A step runs as written this often before it is recorded: libraries set themselves up on first use.
WARM_UP = 1
Outputs = dict[str, Tensor]
Step = Callable[..., Outputs]
Signature = tuple[Hashable, ...]


@dataclass(frozen=True, eq=False)
class _Tape:
    """A recorded step with the memory it reads its inputs from and writes its outputs to."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: Outputs

    def replay(self, inputs: Sequence[Tensor]) -> Outputs:
        torch._foreach_copy_(self.inputs, list(inputs))
        self.graph.replay()
        return {name: value.clone() for name, value in self.outputs.items()}  # the next replay overwrites


class Recorder:
    """Recordings of one step, one for every shape of its inputs that comes often enough.

    The step reads its inputs and changes tensors that stay where they are. Whoever moves one of them (a new
    optimizer state, another device) or changes a number that is none calls `forget`. `generators` are those
    the step draws from: a replay goes on where the last one stopped.
    """

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        self._generators = tuple(generators)
        self._stream: torch.cuda.Stream | None = None
        self.refused = ""  # why the step cannot be recorded
        self.forget()

    def forget(self) -> None:
        """Throw the recordings away; the next steps make new ones."""
        self._tapes: dict[Signature, _Tape] = {}
        self._runs: dict[Signature, int] = {}

    @property
    def recordings(self) -> int:
        """How many recordings there are."""
        return len(self._tapes)

    def run(self, step: Step, *inputs: Tensor, variant: Hashable = None) -> Outputs:
        """Return what the step returns, having done what it does.

        `variant` tells apart steps that do not do the same on inputs of one shape.
        """
        if self.refused or any(value.device.type != "cuda" for value in inputs):
            return step(*inputs)
        signature = (variant, *((value.shape, value.dtype) for value in inputs))
        if signature not in self._tapes:
            self._runs[signature] = self._runs.get(signature, 0) + 1
            if self._runs[signature] <= WARM_UP:
                return self._aside(step, inputs)
            if not self._record(step, signature, inputs):
                return step(*inputs)
        return self._tapes[signature].replay(inputs)

    def _aside(self, step: Step, inputs: Sequence[Tensor]) -> Outputs:
        """Run the step on the stream that will record it."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            outputs = step(*inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return outputs

    def _record(self, step: Step, signature: Signature, inputs: Sequence[Tensor]) -> bool:
        """Record the step; return whether it could be. Nothing is computed meanwhile."""
        graph, held = torch.cuda.CUDAGraph(), tuple(_placed(value) for value in inputs)
        before = [generator.clone_state() for generator in self._generators]
        for generator in self._generators:
            graph.register_generator_state(generator)
        try:
            # Other threads may go on making batches.
            recording = torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")
            with _without_collecting(), recording:
                outputs = step(*held)
        except RuntimeError as error:
            for generator, state in zip(self._generators, before, strict=True):
                generator.graphsafe_set_state(state)  # its own still waits for the end of a recording
            first = error.__context__ or error  # what broke the recording, not how it ended
            self.refused = " ".join(str(first).split())
            return False
        self._tapes[signature] = _Tape(graph, held, outputs)
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recorder":
        """Return a recorder without recordings: those read and write the original's tensors."""
        return Recorder([copy.deepcopy(generator, memo) for generator in self._generators])


def _placed(value: Tensor) -> Tensor:
    """Return a copy of an input where a recording will read it: images with their channels last.

    So the nets on a GPU take them: a copy turns them once, where every pass would turn them again.
    """
    return value.clone(memory_format=torch.channels_last) if value.dim() == 4 else value.clone()


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Keep Python from collecting garbage: an old recording among it would break the one being made."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Branch:
    """Work of a recorded step that the GPU may do beside what follows, until it is joined.

    Small batches leave most of a GPU idle: a second net's pass then takes no time of its own. Where nothing
    is being recorded the work is done in its place. What it makes must be kept until after the join. All
    branches of a thread share one stream: replays of two recordings must not overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._block: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> "Branch":
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._stream = _beside(torch.cuda.current_device())
            self._stream.wait_stream(torch.cuda.current_stream())
            self._block = torch.cuda.stream(self._stream)
        self._block.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._block.__exit__(*error)  # type: ignore[arg-type]
        if error[0] is not None:
            self.join()  # else the recording's end would complain of that

    def join(self) -> None:
        """Have whatever follows wait for the work; once is enough."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._stream = None


@cache
def _beside(device: int) -> torch.cuda.Stream:
    """Return the stream that branches are recorded on: torch has few and deals them out again and again."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def adam_options(device: torch.device) -> dict[str, Any]:
    """Return how Adam runs on a device: on a GPU in few kernels, all of whose numbers live there."""
    return {"fused": True, "capturable": True} if device.type == "cuda" else {}


def suited(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a saved state for the device of this optimizer: how it runs there does not come from a file."""
    groups = [
        {**group, **{name: own[name] for name in ("fused", "capturable") if name in own}}
        for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**saved, "param_groups": groups}


@torch.no_grad()
def overwritten(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> bool:
    """Write a saved state into the tensors an optimizer has; return False, having done nothing, if it cannot.

    A tensor that the saved state does not have yet becomes zero, which is what Adam and SGD start from.
    """
    own, saved = optimizer.state_dict(), suited(saved, optimizer)
    if saved["param_groups"] != own["param_groups"] or not saved["state"].keys() <= own["state"].keys():
        return False
    pairs = [
        (value, saved["state"].get(index, {}).get(name))
        for index, entry in own["state"].items()
        for name, value in entry.items()
    ]
    if not all(isinstance(value, Tensor) for value, _ in pairs):
        return False
    for value, before in pairs:
        value.zero_() if before is None else value.copy_(before)
    return True
