"""A folder of images in, a file of predictions out: adaptation where no labels exist."""

import csv
import os
from collections.abc import Callable, Iterator, Sequence
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
) -> FolderResult:
    """Adapt along the images of a folder and return a prediction for each, in order of their names.

    They arrive in an order drawn by `seed`: names often go by class, and whatever adapts online is misled by
    streams of one class after another. None: they arrive by name, as where names are times. Images are
    decoded batch by batch, so that a folder of any size fits. What was predicted when somebody interrupts is
    returned.
    """
    paths = list_images(folder)
    order = range(len(paths)) if seed is None else online_order(len(paths), seed).tolist()
    found: dict[int, Prediction] = {}
    bad: list[str] = []
    last: Tensor | None = None
    done = 0
    try:
        for start in range(0, len(paths), batch_size):
            numbers = order[start : start + batch_size]
            part, fed = [paths[number] for number in numbers], trained.preprocessing
            images, kept, broken = decode_all(part, fed.size, fed.channels, skip_bad, fit=fed.fit)
            if kept:
                names = [printable(part[index].relative_to(folder)) for index in kept]
                told = _predict(adapter, images, names, trained.classes)
                found |= zip((numbers[index] for index in kept), told, strict=True)
                last = images if last is None or len(images) >= len(last) else last
            bad += broken
            done += len(part)
            if progress is not None:
                progress(done, len(paths))
    except KeyboardInterrupt:
        if last is None:
            raise
    if last is None:
        raise DataError(f"{folder}: none of its {len(paths)} images could be read")
    return FolderResult([found[number] for number in sorted(found)], bad, last, len(paths) - done)


def _predict(
    adapter: Adapter | Guarded, images: Tensor, names: Sequence[str], classes: Sequence[str]
) -> Iterator[Prediction]:
    device = next(adapter.model.parameters()).device
    found = adapter.predict(to_float(images, device))
    spread = [None] * len(names) if found.spread is None else found.spread.tolist()
    columns = (names, found.label.tolist(), found.probability.tolist(), found.entropy.tolist(), spread)
    return (Prediction(name, classes[k], *values) for name, k, *values in zip(*columns, strict=True))


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write predictions.csv (path, label, probability, entropy), all or nothing.

    Where w was drawn for any image there is a fifth column, its spread, empty where the source predicted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            drawn = any(line.spread is not None for line in predictions)
            writer.writerow(["path", "label", "probability", "entropy", *(["spread"] if drawn else [])])
            for line in predictions:
                values = [line.probability, line.entropy, *([line.spread] if drawn else [])]
                texts = ["" if value is None else f"{value:.6f}" for value in values]
                writer.writerow([line.path, line.label, *texts])
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def adapted(trained: Trained, adapter: Adapter, images: Tensor) -> Trained:
    """Return the trained model with the weights and statistics an adapter has arrived at.

    Statistics that are each batch's own are settled on the images.
    """
    model = frozen(adapter, to_float(images, next(adapter.model.parameters()).device))
    assert isinstance(model, Classifier)
    facts = {**trained.provenance, "adapted_steps": adapter.steps_taken}
    return replace(trained, model=model, provenance=facts)
