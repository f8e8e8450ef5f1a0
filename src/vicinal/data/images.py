"""Image files -> uint8 tensors: finding them, decoding them, saying plainly what is wrong with one."""

import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from vicinal.errors import ConfigError, DataError

Progress = Callable[[int, int], None]

# Pillow knows these by their first bytes, but hands them to another program or cannot decode them at all.
NOT_DECODED = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"})
WHITE = (255, 255, 255, 255)
MODE_OF_CHANNELS = {1: "L", 3: "RGB"}
MAX_16_BIT = 65535
MAX_THREADS = 16
# Left behind by archives made on macOS, full of files that only look like images.
LITTER = frozenset({"__MACOSX"})

Image.init()
FORMATS = tuple(name for name in Image.ID if name not in NOT_DECODED)
IMAGE_SUFFIXES = frozenset(
    suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS
)


def decode_image(path: Path, size: int, channels: int) -> Tensor:
    """Return the image as uint8 (channels, size, size).

    It is turned upright, its shorter side resized to `size`, its centre cropped. Of an animation the first
    frame counts. What is transparent lies on white.
    """
    require_shape(size, channels)
    image = _opaque(_eight_bit(_read(path), path))
    # `fit` crops before it resizes: the same picture as resizing first, with no huge one in between when an
    # image is very long and thin.
    fitted = ImageOps.fit(image.convert("RGB"), (size, size), method=Image.Resampling.BICUBIC)
    pixels = np.array(fitted.convert(MODE_OF_CHANNELS[channels]))
    return torch.from_numpy(pixels).reshape(size, size, channels).permute(2, 0, 1).contiguous()


def require_shape(size: int, channels: int) -> None:
    """Raise unless images of that size and number of channels can be made."""
    if channels not in MODE_OF_CHANNELS or size < 1:
        raise ConfigError(f"images need 1 or 3 channels and a size of at least 1, not {channels} and {size}")


def _read(path: Path) -> Image.Image:
    """Return the first frame, decoded and turned as its EXIF orientation says."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            _refuse_bomb(image)
            return ImageOps.exif_transpose(image)
    except UnidentifiedImageError as error:
        why = "the file is empty" if path.stat().st_size == 0 else "not an image that Pillow can read"
        raise DataError(f"{printable(path)}: {why}") from error
    # Pillow's decoders raise many kinds on damaged files: OSError, SyntaxError, ValueError, struct.error ...
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{printable(path)}: cannot be decoded ({why})") from error


def _refuse_bomb(image: Image.Image) -> None:
    """Raise for an image past Pillow's limit, where Pillow itself only warns up to twice the limit."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise ValueError(f"{image.width} x {image.height} pixels is past the safe limit of {limit}")


def _eight_bit(image: Image.Image, path: Path) -> Image.Image:
    """Return the image with 8 bits a channel, scaled by the range of its format, not by its own extremes.

    Scaling by the extremes of each image would undo its exposure and change it with one stray pixel.
    """
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    top = 1.0 if image.mode == "F" else MAX_16_BIT
    values = np.asarray(image).astype(np.float64)
    if not (values.min() >= 0 and values.max() <= top):
        found = f"values from {values.min():g} to {values.max():g}, past 0 to {top:g}"
        raise DataError(f"{printable(path)}: {found}; save it with 8 or 16 bits a channel")
    return Image.fromarray(np.rint(values * (255 / top)).astype(np.uint8))


def _opaque(image: Image.Image) -> Image.Image:
    """Return the image laid on white where it is transparent."""
    if not image.has_transparency_data:
        return image
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, WHITE), layer)


def list_images(folder: Path) -> list[Path]:
    """Return all image files below the folder in natural order; hidden ones are skipped, links followed."""
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"'{printable(folder)}' {problem}: give a folder of images")
    found = sorted(_walk(folder, ()), key=lambda path: natural_key(path.relative_to(folder).as_posix()))
    if not found:
        raise DataError(f"'{printable(folder)}' holds no images: put files such as .jpg or .png there")
    return found


def _walk(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the image files below a folder, not entering one that is its own ancestor through a link."""
    real = folder.resolve()
    if real in above:
        return
    for entry in visible(folder):
        if entry.is_dir():
            yield from _walk(entry, (*above, real))
        # A dangling link is kept, so that it is reported as a bad image and not silently missing.
        elif entry.suffix.lower() in IMAGE_SUFFIXES and (entry.is_file() or not entry.exists()):
            yield entry


def visible(folder: Path) -> list[Path]:
    """Return what the folder holds, in natural order, without hidden entries."""
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        raise DataError(f"'{printable(folder)}' cannot be listed: {error.strerror}") from error
    shown = (entry for entry in entries if not entry.name.startswith(".") and entry.name not in LITTER)
    return sorted(shown, key=lambda entry: natural_key(entry.name))


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Return a sorting key by which 'a2' comes before 'a10', and upper and lower case side by side."""
    parts = re.split(r"(\d+)", name.casefold())
    return tuple(int(part) if part.isdecimal() else part for part in parts), name


def printable(path: Path) -> str:
    """Return the path as text that any UTF-8 output can take, whatever bytes the name holds."""
    return os.fsencode(path.as_posix()).decode("utf-8", errors="replace")


def decode_all(
    paths: Sequence[Path], size: int, channels: int, skip_bad: bool, progress: Progress | None = None
) -> tuple[Tensor, list[int], list[str]]:
    """Return the images (N, channels, size, size), the positions in `paths` they have, and "path: why" lines.

    Without `skip_bad` the first bad image, in the order of `paths`, raises.
    """
    require_shape(size, channels)
    images = torch.empty(len(paths), channels, size, size, dtype=torch.uint8)
    kept: list[int] = []
    bad: list[str] = []
    with closing(_decode_in_threads(paths, size, channels)) as results:
        for position, result in enumerate(results):
            if isinstance(result, Tensor):
                images[len(kept)] = result
                kept.append(position)
            elif skip_bad:
                bad.append(str(result))
            else:
                raise DataError(f"{result}; mend or remove it, or pass --skip-bad") from result
            if progress is not None:
                progress(position + 1, len(paths))
    return images[: len(kept)], kept, bad


def _decode_in_threads(
    paths: Sequence[Path], size: int, channels: int
) -> Generator[Tensor | DataError, None, None]:
    """Yield each image, or the reason why there is none, in the order of `paths`."""
    executor = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
    try:
        yield from executor.map(partial(_try_decode, size=size, channels=channels), paths)
    finally:
        # Reached early when a bad image or an interrupt ends the loop: what is still waiting is dropped.
        executor.shutdown(cancel_futures=True)


def _try_decode(path: Path, size: int, channels: int) -> Tensor | DataError:
    """Return the image, or the error that says why there is none."""
    try:
        return decode_image(path, size, channels)
    except DataError as error:
        return error
