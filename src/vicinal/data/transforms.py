"""Transforms of whole batches on their device: bytes to floats, and hardening for phi's lessons."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad
from torchvision.transforms.v2 import functional as vision

from vicinal.errors import DataError

POSTERISE_BITS = 2
# Grows with the square root of the side: 0.8 px at 16 px, 3 px at 224 px. In proportion to the side it would
# leave a small image untouched or a large one without detail.
BLUR_PER_ROOT_SIDE = 0.2
NOISE_STD = 0.2
NOISE_SEED = 0
SOBEL = ((-1.0, 0.0, 1.0), (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0))
# The response of SOBEL to a step from 0 to 1: such an edge comes out white.
SOBEL_STEP = 4.0


def to_float(images: Tensor, device: torch.device | str) -> Tensor:
    """Return uint8 images as float32 in [0, 1] on the device."""
    if images.dtype != torch.uint8:
        raise DataError(f"expected uint8 images, got {images.dtype}: pass 0..255 values as torch.uint8")
    # Moved as bytes and widened there: a quarter of the traffic. Turned there too, as the nets on a GPU take
    # images: else every pass would turn them again.
    moved = images.to(device, non_blocking=True)
    if moved.device.type == "cuda" and moved.dim() == 4:
        moved = moved.contiguous(memory_format=torch.channels_last)
    return moved.float() / 255


def edges(x: Tensor) -> Tensor:
    """Return the strength of the edges, white on black, in every channel."""
    kernel = torch.tensor(SOBEL, device=x.device, dtype=x.dtype)
    padded = pad(_gray(x), (1, 1, 1, 1), mode="replicate")
    across, down = conv2d(padded, torch.stack([kernel, kernel.T]).unsqueeze(1)).unbind(dim=1)
    strength = (torch.hypot(across, down) / SOBEL_STEP).clamp(0, 1)
    return strength.unsqueeze(1).expand_as(x).contiguous()


def inversion(x: Tensor) -> Tensor:
    """Return the negative, 1 - x."""
    inverted: Tensor = vision.invert(x)
    return inverted


def black_and_white(x: Tensor) -> Tensor:
    """Return white where an image is brighter than its own mean and black elsewhere, in every channel."""
    gray = _gray(x)
    return (gray > gray.mean(dim=(-2, -1), keepdim=True)).to(x.dtype).expand_as(x).contiguous()


def posterised(x: Tensor) -> Tensor:
    """Return the images with four levels of each channel."""
    reduced: Tensor = vision.posterize(x, POSTERISE_BITS)
    return reduced


def blurred(x: Tensor) -> Tensor:
    """Return the images under a Gaussian blur as wide as their size asks for."""
    side = min(x.shape[-2:])
    sigma = BLUR_PER_ROOT_SIDE * math.sqrt(side)
    # The padding reflects, so it must stay inside the image.
    radius = min(math.ceil(3 * sigma), side - 1)
    smooth: Tensor = vision.gaussian_blur(x, [2 * radius + 1, 2 * radius + 1], [sigma, sigma])
    return smooth


def noisy(x: Tensor) -> Tensor:
    """Return the images under Gaussian noise, the same noise at every call."""
    # Drawn on the CPU, so that every device sees the same noise.
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(NOISE_SEED))
    return (x + NOISE_STD * noise.to(x.device, x.dtype)).clamp(0, 1)


def _gray(x: Tensor) -> Tensor:
    """Return the luminance (N, 1, H, W)."""
    if x.shape[-3] == 1:
        return x
    gray: Tensor = vision.rgb_to_grayscale(x)
    return gray


Hardening = Callable[[Tensor], Tensor]

# Each takes and returns a batch (N, C, H, W) in [0, 1], of 1 or 3 channels.
HARDENINGS: Mapping[str, Hardening] = MappingProxyType(
    {
        "edges": edges,
        "inversion": inversion,
        "black_and_white": black_and_white,
        "posterised": posterised,
        "blurred": blurred,
        "noisy": noisy,
    }
)
