"""Images that come as whole arrays: bringing them to another size or number of channels, chunk by chunk."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms.v2.functional import rgb_to_grayscale

from vicinal.data.images import require_shape

# The values that are held as floats at a time: 13 MB.
CHUNK_VALUES = 4096 * 28 * 28


def chunk_length(channels: int, size: int) -> int:
    """Return how many images to handle at a time, so that memory stays bounded whatever their size."""
    return max(1, CHUNK_VALUES // (channels * size * size))


def fitted(images: Tensor, size: int, channels: int) -> Tensor:
    """Return uint8 images (N, C, H, W) as (N, channels, size, size); what fits already is not copied.

    Gray is the luminance; one channel becomes three by repetition, which takes no memory. Resized
    bilinearly, smoothed where that makes them smaller.
    """
    require_shape(size, channels)
    own = min(channels, images.shape[1])
    if images.shape[1:] != (own, size, size):
        images = _converted(images, size, own)
    return images.expand(-1, channels, -1, -1)


def _converted(images: Tensor, size: int, channels: int) -> Tensor:
    out = torch.empty(len(images), channels, size, size, dtype=torch.uint8)
    step = chunk_length(images.shape[1], max(size, *images.shape[-2:]))
    for start in range(0, len(images), step):
        chunk = images[start : start + step].float()
        if channels < chunk.shape[1]:
            chunk = rgb_to_grayscale(chunk)
        if chunk.shape[-2:] != (size, size):
            chunk = interpolate(chunk, (size, size), mode="bilinear", align_corners=False, antialias=True)
        out[start : start + step] = to_bytes(chunk)
    return out


def to_bytes(values: Tensor) -> Tensor:
    """Return values in 0..255, rounded, as uint8; the values themselves are overwritten."""
    return values.round_().clamp_(0, 255).to(torch.uint8)
