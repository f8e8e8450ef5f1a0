"""The whole augmentation in one pass over each image on the CPU, where the package numba is installed.

Formulas are those of `augment_batch`: nothing is rounded to whole levels on the way. Threads are this
module's own and end with each call, so that calls may come from several threads at once and after a fork.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vicinal.data.fused import ROW

# Fewer numbers than this are made faster than a thread starts.
LEAST_PER_THREAD = 1 << 18
Kernel = Callable[..., None]


def augment_fused_cpu(images: Tensor, rows: Tensor) -> Tensor | None:
    """Return float32 images for bytes or floats (N, 1 or 3, H, W) on the CPU; None where this way is closed.

    rows (N, 11) holds the columns named in ROW. The same rows give the same bits with any number of threads.
    """
    if images.device.type != "cpu" or images.shape[1] not in (1, 3):
        return None
    bytes_ = images.dtype == torch.uint8
    samples = rows.detach().double().contiguous().numpy()
    kernel = _kernel(bytes_) if _inside(samples, images.shape) else None
    if kernel is None:
        return None
    pixels = images.detach() if bytes_ else images.detach().float()
    # numpy asks for large pages, which come several times faster than the many small ones of torch.
    results = np.empty(images.shape, np.float32)
    arrays = (pixels.contiguous().numpy(), samples, results)
    _run(kernel, arrays, np.float32(255 if bytes_ else 1))
    return torch.from_numpy(results)


def _inside(samples: NDArray[np.float64], shape: torch.Size) -> bool:
    """Return whether there is one row for each image, with a box inside it: the kernel does not look."""
    if samples.shape != (shape[0], len(ROW)):
        return False
    corner, size = samples[:, 0:2], samples[:, 2:4]
    return bool(((corner >= 0) & (size >= 1) & (corner + size <= shape[2:])).all())


def _run(kernel: Kernel, arrays: tuple[NDArray[Any], ...], level: np.float32) -> None:
    """Fill the last of the arrays, a slice of the batch in each of as many threads as torch may use."""
    count, size = len(arrays[0]), arrays[0].size
    threads = max(1, min(torch.get_num_threads(), count, size // LEAST_PER_THREAD))
    if threads == 1:
        return kernel(*arrays, level)
    cuts = [count * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads - 1) as executor:
        slices = [slice(*cuts[part : part + 2]) for part in range(threads)]
        others = [executor.submit(kernel, *(a[part] for a in arrays), level) for part in slices[1:]]
        kernel(*(a[slices[0]] for a in arrays), level)
        for other in others:
            other.result()
    return None


@cache
def _kernel(bytes_: bool) -> Kernel | None:
    """Return the kernel, compiled for bytes or floats, or None where it cannot be."""
    # Imported late: numba takes a while, and many runs augment nothing. It may be missing, too old or too new
    # for the numpy beside it, or short of space on the disk: whatever it is, there is another way.
    try:
        from vicinal.data.fused_cpu_kernel import augment_samples

        nothing = np.empty((0, 1, 1, 1), np.uint8 if bytes_ else np.float32)
        augment_samples(nothing, np.empty((0, len(ROW))), np.empty((0, 1, 1, 1), np.float32), np.float32(1))
    except Exception:
        return None
    return augment_samples
