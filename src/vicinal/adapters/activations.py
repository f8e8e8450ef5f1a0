"""ReLUs whose work a BatchNorm layer does along with its own, in the kernel that normalizes.

A ReLU that overwrites what it is fed says that nobody else needs the values from before. Where it is fed what
a layer has just put out, the layer can put out rectified values at once, and the ReLU has nothing left to do.
Which layers are followed so is seen in the first pass; later ones make use of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from vicinal.models.wrap import Wrapped

Use = tuple[int, int]  # a layer, and which of its uses in a pass


class Output(NamedTuple):
    """What a layer has put out."""

    use: Use
    y: Tensor
    version: int  # of y: another one says that it has been written to since
    rectified: bool


class Activations:
    """The ReLUs of a net that overwrite, and after which uses of its layers one of them comes at once."""

    def __init__(self, model: nn.Module) -> None:
        # A net of somebody's own may go another way with the next batch.
        found = () if isinstance(model, Wrapped) else model.modules()
        self._relus = tuple(m for m in found if type(m) is nn.ReLU and m.inplace)
        self._follow: set[Use] = set()
        self._last: Output | None = None

    def follows(self, use: Use, layer: nn.Module) -> bool:
        """Say whether this use of a layer may put out rectified values."""
        return use in self._follow and not layer._forward_hooks  # one of these would look at others

    def put_out(self, use: Use, y: Tensor, *, rectified: bool) -> None:
        """Take note of what a layer has put out."""
        self._last = Output(use, y, y._version, rectified)

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Let the ReLUs of a pass leave rectified values alone, and see which of them follow a layer."""
        patched = [relu for relu in self._relus if "forward" not in relu.__dict__]
        try:
            for relu in patched:
                relu.__dict__["forward"] = self._forward(relu)
            yield
        finally:
            self._last = None
            for relu in patched:
                del relu.__dict__["forward"]

    def _forward(self, relu: nn.ReLU) -> Callable[[Tensor], Tensor]:
        as_written = relu.forward

        def forward(x: Tensor) -> Tensor:
            last, self._last = self._last, None
            if last is None or last.y is not x or last.version != x._version:
                return as_written(x)
            if last.rectified:
                return x
            if not relu._forward_pre_hooks:
                self._follow.add(last.use)
            return as_written(x)

        return forward
