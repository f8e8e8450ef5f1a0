"""A folder of images in, a file of predictions out: adaptation where no labels exist."""

import csv
import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.export import frozen
from vicinal.adapters.guard import Guarded
from vicinal.checkpoint import Trained
from vicinal.data.files import list_images, printable
from vicinal.data.images import decode_all
from vicinal.data.streams import online_order
from vicinal.data.transforms import to_float
from vicinal.errors import DataError
from vicinal.models.classifier import Classifier

Progress = Callable[[int, int], None]
WHOLE, PARTIAL = "predictions.csv", "predictions.partial.csv"
COLUMNS = ("path", "label", "probability", "entropy")
SPREAD = "spread"


@dataclass(frozen=True)
class Prediction:
    """What the adapted model says of one image."""

    path: str
    label: str
    probability: float
    entropy: float
    spread: float | None = None  # standard deviation of the probability over draws of w, where there are any


@dataclass(frozen=True)
class FolderResult:
    """All predictions of a folder and the images that could not be read, each as "path: why"."""

    predictions: list[Prediction]
    bad: list[str]
    last: Tensor  # images of the last batch that was not cut short, for statistics to be settled on
    left: int = 0  # images that were not come to, since somebody interrupted


def predict_folder(
    adapter: Adapter | Guarded,
    trained: Trained,
    folder: Path,
    batch_size: int,
    *,
    seed: int | None = 0,
    skip_bad: bool = False,
    progress: Progress | None = None,
    keep: Callable[[Mapping[int, Prediction]], None] | None = None,
) -> FolderResult:
    """Adapt along the images of a folder and return a prediction for each, in order of their names.

    They arrive in an order drawn by `seed`: names often go by class, and whatever adapts online is misled by
    streams of one class after another. None: they arrive by name, as where names are times. Images are
    decoded batch by batch, so that a folder of any size fits. `keep` is given the predictions of each batch,
    by position in order of names, as they come. What was predicted when somebody interrupts is returned.
    """
    paths = list_images(folder)
    order = range(len(paths)) if seed is None else online_order(len(paths), seed).tolist()
    found: dict[int, Prediction] = {}
    bad: list[str] = []
    last: Tensor | None = None
    try:
        for start in range(0, len(paths), batch_size):
            numbers = order[start : start + batch_size]
            part, fed = [paths[number] for number in numbers], trained.preprocessing
            try:
                images, kept, broken = decode_all(part, fed.size, fed.channels, skip_bad, fit=fed.fit)
            except DataError as error:
                left = f"{len(paths) - len(found) - len(bad)} of {len(paths)} images are left"
                raise DataError(f"{error} to go on without it: {left}") from error
            bad += broken
            if kept:
                names = [printable(part[index].relative_to(folder)) for index in kept]
                told = _predict(adapter, images, names, trained.classes)
                new = dict(zip((numbers[index] for index in kept), told, strict=True))
                found |= new
                last = images if last is None or len(images) >= len(last) else last
                if keep is not None:
                    keep(new)
            if progress is not None:
                progress(start + len(part), len(paths))
    except KeyboardInterrupt:
        if last is None:
            raise
    if last is None:
        raise DataError(f"{folder}: none of its {len(paths)} images could be read")
    return FolderResult(
        [found[number] for number in sorted(found)], bad, last, len(paths) - len(found) - len(bad)
    )


def _predict(
    adapter: Adapter | Guarded, images: Tensor, names: Sequence[str], classes: Sequence[str]
) -> Iterator[Prediction]:
    device = next(adapter.model.parameters()).device
    found = adapter.predict(to_float(images, device))
    spread = [None] * len(names) if found.spread is None else found.spread.tolist()
    columns = (names, found.label.tolist(), found.probability.tolist(), found.entropy.tolist(), spread)
    return (Prediction(name, classes[k], *values) for name, k, *values in zip(*columns, strict=True))


class PredictionFile:
    """Predictions in a folder as they come: whatever ends a run, those it has made are on disk.

    Rows are appended to predictions.partial.csv in order of arrival. In the end they are put in order of the
    names, and only all of them become predictions.csv.
    """

    def __init__(self, folder: Path) -> None:
        self.whole, self.partial = folder / WHOLE, folder / PARTIAL
        self._found: dict[int, Prediction] = {}
        self._written = 0

    def add(self, found: Mapping[int, Prediction]) -> None:
        """Append the predictions of a batch, given by position in order of names: all of them or none."""
        first = not self._found
        self._found |= found
        # Whether w is drawn for any image is known in the end only: the column of its spread is always here.
        rows = _rows(found.values(), drawn=True)
        text = _as_text([(*COLUMNS, SPREAD), *rows] if first else rows)
        with _named_errors(self.partial):
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            with self.partial.open("wb" if first else "ab", buffering=0) as file:
                before = file.seek(0, os.SEEK_END)
                try:
                    if file.write(text) != len(text):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    file.truncate(before)  # half a row would be taken for a whole one
                    raise
        self._written = len(self._found)

    def finish(self) -> None:
        """Write predictions.csv, which takes the place of the partial file."""
        write_predictions(self.whole, self._sorted())
        self.partial.unlink(missing_ok=True)

    def stop(self) -> int:
        """Leave a partial file, in order of names where the disk allows; return how many rows it has."""
        if self._found:
            try:
                write_predictions(self.partial, self._sorted())
            except DataError:
                return self._written
        return len(self._found)

    def _sorted(self) -> list[Prediction]:
        return [self._found[number] for number in sorted(self._found)]


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write a table of predictions (path, label, probability, entropy), all or nothing.

    Where w was drawn for any image there is a fifth column, its spread, empty where the source predicted.
    """
    drawn = any(line.spread is not None for line in predictions)
    head = (*COLUMNS, SPREAD) if drawn else COLUMNS
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with _named_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(_as_text([head, *_rows(predictions, drawn)]))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _rows(predictions: Iterable[Prediction], drawn: bool) -> Iterator[tuple[str, ...]]:
    for line in predictions:
        values = (line.probability, line.entropy, *([line.spread] if drawn else []))
        yield line.path, line.label, *("" if value is None else f"{value:.6f}" for value in values)


def _as_text(rows: Iterable[Sequence[str]]) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file).writerows(rows)
    return file.getvalue().encode()


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Turn what the system says of a file that cannot be written into a line that names it."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise DataError(
            f"{path} cannot be written ({why}): free some disk space or choose another folder"
        ) from error


def adapted(trained: Trained, adapter: Adapter, images: Tensor) -> Trained:
    """Return the trained model with the weights and statistics an adapter has arrived at.

    Statistics that are each batch's own are settled on the images.
    """
    model = frozen(adapter, to_float(images, next(adapter.model.parameters()).device))
    assert isinstance(model, Classifier)
    facts = {**trained.provenance, "adapted_steps": adapter.steps_taken}
    return replace(trained, model=model, provenance=facts)
