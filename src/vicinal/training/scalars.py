"""Scalars of a run for TensorBoard, where it is installed, and as lines of JSON in any case."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Scalars:
    """Appends (step, name, value) of a run to its folder."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None
        self._board: Any = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "scalars.jsonl").open("a")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Store the values of one step."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if self._board is not None:
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush everything."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
