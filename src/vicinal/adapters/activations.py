"""ReLUs whose work a BatchNorm layer does along with its own, in the kernel that normalizes.

Where a ReLU is fed what a layer has just put out, and overwrites it, the layer can put out rectified values
at once, and the ReLU has nothing left to do. That nobody reads the values in between is taken for granted of
a net that overwrites them. Which layers are followed so is seen in the first pass; later ones make use of it.
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
        self._follow: dict[Use, nn.ReLU] = {}
        self._saved: list[nn.ReLU] = []  # of this pass: those that can be left out
        self._last: Output | None = None

    def follows(self, use: Use, layer: nn.Module) -> bool:
        """Say whether this use of a layer may put out rectified values."""
        relu = self._follow.get(use)
        return any(relu is one for one in self._saved) and not layer._forward_hooks

    def put_out(self, use: Use, y: Tensor, *, rectified: bool) -> None:
        """Take note of what a layer has put out."""
        self._last = Output(use, y, y._version, rectified)

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Let the ReLUs of a pass leave rectified values alone, and see which of them follow a layer."""
        before = self._saved
        self._saved = [relu for relu in self._relus if _plain(relu)]
        try:
            for relu in self._saved:
                relu.__dict__["forward"] = self._forward(relu)
            yield
        finally:
            for relu in self._saved:
                del relu.__dict__["forward"]
            self._saved, self._last = before, None

    def _forward(self, relu: nn.ReLU) -> Callable[[Tensor], Tensor]:
        as_written = relu.forward

        def forward(x: Tensor) -> Tensor:
            last, self._last = self._last, None
            if last is None or last.y is not x or last.version != x._version:
                return as_written(x)
            if last.rectified:
                return x
            self._follow[last.use] = relu
            return as_written(x)

        return forward


def _plain(relu: nn.ReLU) -> bool:
    """Say whether nobody would notice that values are rectified when they come to it."""
    return relu.inplace and "forward" not in relu.__dict__ and not relu._forward_pre_hooks
