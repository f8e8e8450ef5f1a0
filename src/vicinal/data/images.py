"""Image files -> uint8 tensors: decoding them, saying plainly what is wrong with one."""

import io
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from vicinal.data.files import FORMATS, ImageFile, plain_file, printable
from vicinal.errors import ConfigError, DataError

Progress = Callable[[int, int], None]
Fit = Literal["crop", "squash"]

WHITE = (255, 255, 255, 255)
MODE_OF_CHANNELS = {1: "L", 3: "RGB"}
MAX_16_BIT = 65535
MAX_THREADS = 16
# Images decoded ahead of the one that is asked for: enough to keep the threads busy, few enough for memory.
AHEAD_PER_THREAD = 8


@dataclass(frozen=True)
class Decoding:
    """How a picture becomes pixels: its side, its channels, and how one that is not square is made so.

    "crop" resizes the shorter side and cuts the centre, "squash" resizes both sides and keeps everything.
    """

    size: int
    channels: int
    fit: Fit = "crop"

    def __post_init__(self) -> None:
        require_shape(self.size, self.channels)
        if self.fit not in ("crop", "squash"):
            raise ConfigError(f"unknown fit '{self.fit}': choose from crop, squash")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        return self.channels, self.size, self.size


def decode_image(path: Path, size: int, channels: int, fit: Fit = "crop") -> Tensor:
    """Return the image as uint8 (channels, size, size)."""
    return decode_file(plain_file(path), Decoding(size, channels, fit))


def decode_file(file: ImageFile, how: Decoding) -> Tensor:
    """Return the image as uint8 (channels, size, size).

    It is turned upright and made square. Of an animation the first frame counts. What is transparent lies on
    white.
    """
    name = printable(file.shown)
    image = _opaque(_eight_bit(_read(file, name), name)).convert("RGB")
    side, method = (how.size, how.size), Image.Resampling.BICUBIC
    # `fit` crops before it resizes: the same picture as resizing first, with no huge one in between when an
    # image is very long and thin.
    square = ImageOps.fit(image, side, method) if how.fit == "crop" else image.resize(side, method)
    pixels = np.array(square.convert(MODE_OF_CHANNELS[how.channels]))
    return torch.from_numpy(pixels).reshape(*side, how.channels).permute(2, 0, 1).contiguous()


def require_shape(size: int, channels: int) -> None:
    """Raise unless images of that size and number of channels can be made."""
    if channels not in MODE_OF_CHANNELS or size < 1:
        raise ConfigError(f"images need 1 or 3 channels and a size of at least 1, not {channels} and {size}")


def _read(file: ImageFile, name: str) -> Image.Image:
    """Return the first frame, decoded and turned as its EXIF orientation says."""
    data = b""
    try:
        data = file.read()
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _refuse_bomb(image)
            return ImageOps.exif_transpose(image)
    except UnidentifiedImageError as error:
        why = "not an image that Pillow can read" if data else "the file is empty"
        raise DataError(f"{name}: {why}") from error
    # Pillow's decoders raise many kinds on damaged files: OSError, SyntaxError, ValueError, struct.error ...
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{name}: cannot be decoded ({why})") from error


def _refuse_bomb(image: Image.Image) -> None:
    """Raise for an image past Pillow's limit, where Pillow itself only warns up to twice the limit."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise ValueError(f"{image.width} x {image.height} pixels is past the safe limit of {limit}")


def _eight_bit(image: Image.Image, name: str) -> Image.Image:
    """Return the image with 8 bits a channel, scaled by the range of its format, not by its own extremes.

    Scaling by the extremes of each image would undo its exposure and change it with one stray pixel.
    """
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    top = 1.0 if image.mode == "F" else MAX_16_BIT
    values = np.asarray(image).astype(np.float64)
    if not (values.min() >= 0 and values.max() <= top):
        found = f"values from {values.min():g} to {values.max():g}, past 0 to {top:g}"
        raise DataError(f"{name}: {found}; save it with 8 or 16 bits a channel")
    return Image.fromarray(np.rint(values * (255 / top)).astype(np.uint8))


def _opaque(image: Image.Image) -> Image.Image:
    """Return the image laid on white where it is transparent."""
    if not image.has_transparency_data:
        return image
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, WHITE), layer)


def decode_all(
    paths: Sequence[Path],
    size: int,
    channels: int,
    skip_bad: bool,
    progress: Progress | None = None,
    fit: Fit = "crop",
) -> tuple[Tensor, list[int], list[str]]:
    """Return the images (N, channels, size, size), the positions in `paths` they have, and "path: why" lines.

    Without `skip_bad` the first bad image, in the order of `paths`, raises.
    """
    how = Decoding(size, channels, fit)
    images = torch.empty(len(paths), *how.shape, dtype=torch.uint8)
    kept: list[int] = []
    bad: list[str] = []
    with closing(decode_in_order([plain_file(path) for path in paths], how)) as results:
        for position, result in enumerate(results):
            if isinstance(result, Tensor):
                images[len(kept)] = result
                kept.append(position)
            else:
                bad.append(tolerated(result, skip_bad))
            if progress is not None:
                progress(position + 1, len(paths))
    return images[: len(kept)], kept, bad


def tolerated(error: DataError, skip_bad: bool) -> str:
    """Return the line about a bad image that is left out; raise it when none may be."""
    if not skip_bad:
        raise DataError(f"{error}; mend or remove it, or pass --skip-bad") from error
    return str(error)


def decode_in_order(files: Sequence[ImageFile], how: Decoding) -> Generator[Tensor | DataError, None, None]:
    """Yield each image, or the reason why there is none, in the order of `files`, a few decoded ahead."""
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    waiting: deque[Future[Tensor | DataError]] = deque()
    executor = ThreadPoolExecutor(threads)
    try:
        for file in files:
            waiting.append(executor.submit(_try_decode, file, how))
            if len(waiting) > AHEAD_PER_THREAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Reached early when a bad image or an interrupt ends the loop: what is still waiting is dropped.
        executor.shutdown(cancel_futures=True)


def _try_decode(file: ImageFile, how: Decoding) -> Tensor | DataError:
    """Return the image, or the error that says why there is none."""
    try:
        return decode_file(file, how)
    except DataError as error:
        return error
