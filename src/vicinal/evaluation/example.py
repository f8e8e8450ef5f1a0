"""Target images with the predictions before and after adaptation, and the file that keeps some of them.

`examples.json` in a folder of records is a list of objects: the fields of `Example`, the image as a PNG in
base64, shrunk to at most `MAX_SIDE` pixels.
"""

import base64
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from PIL import Image
from torch import Tensor

from vicinal.data.streams import Stream
from vicinal.errors import DataError

FILE = "examples.json"
# Twice the size an image is shown at, for sharp screens; a page with fifty examples stays small.
MAX_SIDE = 192


@dataclass(frozen=True, eq=False)
class Example:
    """One target image (uint8, (C, H, W)) and what was predicted for it; confidences are fractions."""

    image: Tensor
    truth: str
    before: str
    before_confidence: float
    after: str
    after_confidence: float
    target: str
    method: str = ""  # who adapted: a method, or the row of a benchmark
    setting: str = ""  # the column of a benchmark

    @property
    def fixed(self) -> bool:
        """Return whether adaptation turned a wrong prediction into a right one."""
        return self.after == self.truth != self.before

    @property
    def broken(self) -> bool:
        """Return whether adaptation turned a right prediction into a wrong one."""
        return self.before == self.truth != self.after


def changed_positions(before: Tensor, after: Tensor, truth: Tensor, count: int) -> list[int]:
    """Return where adaptation changed right or wrong: up to `count` places it fixed, then as many it broke.

    `before` and `after` are probabilities (N, C) of the same images, `truth` (N,) their classes. The first
    ones in order of arrival are taken: nobody picks the pretty ones.
    """
    was, is_now = before.argmax(-1) == truth, after.argmax(-1) == truth
    fixed, broken = (~was & is_now).nonzero()[:, 0], (was & ~is_now).nonzero()[:, 0]
    return [*fixed[:count].tolist(), *broken[:count].tolist()]


def examples_from(
    stream: Stream,
    answers: Tensor,
    before: Tensor,
    after: Tensor,
    classes: Sequence[str],
    target: str,
    count: int = 3,
) -> list[Example]:
    """Return the first images of a stream that adaptation fixed, then the first it broke, `count` of each.

    `answers` are the classes of all images of the stream's domain; `before` and `after` the probabilities
    (N, C) of two methods along the same stream.
    """
    order = stream.order.cpu()
    truth, old, new = answers.cpu()[order], before.cpu(), after.cpu()
    made = []
    for place in changed_positions(old, new, truth, count):
        image = stream.images[order[place : place + 1]][0]
        (was, was_sure), (is_now, now_sure) = (_top(p[place], classes) for p in (old, new))
        made.append(Example(image, classes[int(truth[place])], was, was_sure, is_now, now_sure, target))
    return made


def _top(p: Tensor, classes: Sequence[str]) -> tuple[str, float]:
    value, index = p.max(-1)
    return classes[int(index)], float(value)


def encode_png(image: Tensor) -> bytes:
    """Return a uint8 image of 1 or 3 channels as a PNG, shrunk if larger than it is shown."""
    if image.ndim != 3 or image.shape[0] not in (1, 3) or image.dtype != torch.uint8:
        raise DataError(
            f"an example needs a uint8 image (1 or 3, H, W), got {image.dtype} {tuple(image.shape)}"
        )
    pixels = image.detach().cpu().permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels[:, :, 0] if image.shape[0] == 1 else pixels)
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()


def save_examples(folder: Path, examples: Sequence[Example]) -> None:
    """Write the examples of a folder, all or nothing; those of an earlier run are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{FILE}.{os.getpid()}.tmp"
    try:
        unfinished.write_text(json.dumps([_as_dict(example) for example in examples], indent=1))
        unfinished.replace(folder / FILE)
    finally:
        unfinished.unlink(missing_ok=True)


def add_examples(folder: Path, examples: Sequence[Example]) -> None:
    """Put examples among those of a folder, in place of earlier ones of their method, setting and target.

    Several runs may do so at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{FILE}.lock"):
        new = {(e.method, e.setting, e.target) for e in examples}
        kept = [e for e in load_examples(folder) if (e.method, e.setting, e.target) not in new]
        save_examples(folder, [*kept, *examples])


def load_examples(folder: Path) -> list[Example]:
    """Return the examples of a folder; none where there is no file of them."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        return [_from_dict(values) for values in json.loads(path.read_bytes())]
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise DataError(f"{path}: not a file of examples ({error}): delete it") from None


def _as_dict(example: Example) -> dict[str, Any]:
    values = {field.name: getattr(example, field.name) for field in fields(Example)}
    return values | {"image": base64.b64encode(encode_png(example.image)).decode()}


def _from_dict(values: dict[str, Any]) -> Example:
    with Image.open(io.BytesIO(base64.b64decode(values["image"]))) as picture:
        pixels = np.array(picture)
    image = torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None]).permute(2, 0, 1)
    return Example(**{**values, "image": image})
