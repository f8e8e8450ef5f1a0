"""CIFAR-10-C's fifteen corruptions made anew, where the published arrays are not at hand.

They are made by the library imagecorruptions-imaug, which has ImageNet-C's constants. The published
CIFAR-10-C has milder ones at the same severity (Gaussian noise at severity 5: 0.10 there, 0.38 here), so
results on images made here cannot be set beside results on the published ones: whatever holds them says
"regenerated".
"""

import contextlib
import hashlib
import importlib
import io
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vicinal.data.files import printable
from vicinal.data.images import Progress
from vicinal.errors import DataError

Bytes = NDArray[np.uint8]

LIBRARY = "imagecorruptions-imaug"
MODULE = "imagecorruptions"
# The two that draw from a generator of their own, which numpy's global seed does not reach.
OWN_SEED = frozenset({"impulse_noise", "glass_blur"})
CONSTANTS = "ImageNet-C's, stronger than those of the published CIFAR-10-C"
# Of the packages that compute the pixels; named in the file beside a cached array.
COMPUTING = ("numpy", "scipy", "scikit-image", "opencv-python", "pillow")
PROGRESS_STEP = 500


def library_version() -> str:
    """Return the version of the library that makes corruptions; raise where it is not installed."""
    # By distribution, not by module: the older package imagecorruptions has the same module, but its fog and
    # glass blur fail with numpy 2 and with today's scikit-image.
    try:
        return metadata.version(LIBRARY)
    except metadata.PackageNotFoundError as error:
        raise DataError(
            "making corruptions anew needs a library that is missing: pip install 'vicinal[corruptions]'"
        ) from error


def corrupted(
    images: Tensor, corruption: str, severity: int, seed: int = 0, progress: Progress | None = None
) -> Bytes:
    """Return uint8 images (N, 3, H, W) under a corruption, as uint8 (N, H, W, 3).

    Each image has a seed of its own, so that it comes out the same whichever others are made with it. Draws
    come from numpy's global generator, whose state is put back at the end: not for several threads at once.
    """
    library_version()
    corrupt: Callable[..., Bytes] = importlib.import_module(MODULE).corrupt
    rows = images.permute(0, 2, 3, 1).contiguous().numpy()
    out = np.empty_like(rows)
    with _global_generator_kept():
        for position, row in enumerate(rows):
            own = _image_seed(seed, corruption, severity, position)
            np.random.seed(own)  # the library draws from the global generator
            options = {"seed": own} if corruption in OWN_SEED else {}
            out[position] = corrupt(row, severity=severity, corruption_name=corruption, **options)
            done = position + 1
            if progress is not None and (done % PROGRESS_STEP == 0 or done == len(rows)):
                progress(done, len(rows))
    return out


def _image_seed(seed: int, corruption: str, severity: int, position: int) -> int:
    """Return 32 bits that differ by image, corruption and severity."""
    entropy = [seed, zlib.crc32(corruption.encode()), severity, position]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


@contextlib.contextmanager
def _global_generator_kept() -> Iterator[None]:
    """Put numpy's global generator back as it was, and keep what the library prints to itself."""
    state = np.random.get_state()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        np.random.set_state(state)


def regenerate(
    images: Tensor,
    wanted: Sequence[tuple[str, int]],
    seed: int = 0,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> list[Tensor]:
    """Return the images (N, 3, H, W) under each wanted corruption and severity.

    With a folder, each is kept there as .npy, memory-mapped when it is wanted again, with a .json beside it
    that says how it was made. `progress` counts the images of all of them.
    """
    digest = hashlib.sha256(images.contiguous().numpy().tobytes()).hexdigest()
    made = []
    for position, (corruption, severity) in enumerate(wanted):
        report = _shifted(progress, position * len(images), len(wanted) * len(images))
        origin = {
            "corruption": corruption,
            "severity": severity,
            "seed": seed,
            "library": LIBRARY,
            "version": library_version(),
            "constants": CONSTANTS,
            "source_sha256": digest,
        }
        made.append(_kept(images, origin, folder, report).permute(0, 3, 1, 2))
    return made


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Return a progress that counts on from what was done before."""
    return None if progress is None else lambda done, _: progress(before + done, total)


def _kept(images: Tensor, origin: dict[str, Any], folder: Path | None, progress: Progress | None) -> Tensor:
    """Return the images as kept in the folder, else made and put there, (N, H, W, 3)."""
    # The name holds all that decides the pixels: a file of another origin is never taken for this one.
    key = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:12]
    name = f"{origin['corruption']}-{origin['severity']}-{key}"
    path = None if folder is None else folder / f"{name}.npy"
    if path is not None and path.exists():
        kept = _mapped(path, len(images))
        if kept is not None:
            if progress is not None:
                progress(len(images), len(images))
            return kept
    made = corrupted(images, origin["corruption"], origin["severity"], origin["seed"], progress)
    if path is not None:
        _write(path, made, origin)
    return torch.from_numpy(made)


def _mapped(path: Path, count: int) -> Tensor | None:
    """Return the array in the file without reading it, or None where it is damaged."""
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    fits = array.dtype == np.uint8 and array.ndim == 4 and len(array) == count
    return torch.from_numpy(array) if fits else None


def _write(path: Path, array: Bytes, origin: dict[str, Any]) -> None:
    """Write the array and what is known of it, so that neither is ever seen half-written."""
    computing = {name: _version(name) for name in COMPUTING}
    text = json.dumps(origin | {"computed_with": computing}, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as scratch:
            array_file, text_file = Path(scratch) / path.name, Path(scratch) / "origin.json"
            np.save(array_file, array)
            text_file.write_text(text, encoding="utf-8")
            text_file.replace(path.with_suffix(".json"))
            array_file.replace(path)
    except OSError as error:
        raise DataError(f"'{printable(path.parent)}' cannot be written to: {error.strerror}") from error


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
