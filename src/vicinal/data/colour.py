"""Colour jitter of whole batches, with factors and an order of its own for each sample.

Brightness, contrast and saturation are blends, clamp(f x + (1 - f) other), with other = 0, the mean luminance
of the image, or the luminance of the pixel. Hue turns the colour wheel; grayscale comes last. Formulas and
constants are torchvision's, so that the same parameters give the same pixels.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vicinal.errors import DataError

BRIGHTNESS, CONTRAST, SATURATION, HUE, GRAY = range(5)
# The factor that changes nothing, by operation; a sample that has it skips the operation.
NEUTRAL = (1.0, 1.0, 1.0, 0.0, 0.0)
RED, GREEN, BLUE = 0.2989, 0.587, 0.114
# A pixel without colour has no hue: its spread is raised to this instead of dividing by nothing.
SMALLEST_SPREAD = 1e-12


def jitter_(x: Tensor, order: Tensor, factors: Tensor, gray: Tensor) -> Tensor:
    """Return the float images (N, C, H, W), changed in place.

    order (N, 4) lists the operations as they are applied, factors (N, 4) their factors by operation, gray
    (N,) the samples that lose their colour in the end. All three live on the CPU: what happens to which
    sample is known there, and nothing waits for the device.
    """
    table = torch.cat([factors, gray.unsqueeze(1).to(factors.dtype)], dim=1)
    groups = operation_groups(order.tolist(), table.tolist())
    if not groups:
        return x
    if x.shape[1] not in (1, 3):
        raise DataError(
            f"colour jitter needs 1 or 3 channels, got {x.shape[1]}: switch it off for such images"
        )
    return jitter_by_group_(x, groups, table)


Groups = list[tuple[int, list[int]]]


def operation_groups(order: Sequence[Sequence[int]], table: Sequence[Sequence[float]]) -> Groups:
    """Return (operation, samples) in an order that keeps each sample's own."""
    steps: dict[tuple[int, int], list[int]] = {}
    for sample, (operations, factors) in enumerate(zip(order, table, strict=True)):
        for step, operation in enumerate((*operations, GRAY)):
            if factors[operation] != NEUTRAL[operation]:
                steps.setdefault((step, operation), []).append(sample)
    return [(operation, steps[step, operation]) for step, operation in sorted(steps)]


def jitter_by_group_(x: Tensor, groups: Groups, table: Tensor) -> Tensor:
    """Return the images changed in place, one group of samples with the same operation after the other."""
    factors = upload(table.float(), x.device).view(*table.shape, 1, 1, 1)
    for operation, samples in groups:
        if len(samples) == len(x):
            OPERATIONS[operation](x, factors[:, operation])
            continue
        rows = upload(torch.tensor(samples), x.device)
        part = x[rows]
        OPERATIONS[operation](part, factors[rows, operation])
        x[rows] = part
    return x


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Return small values of the CPU on the device, without waiting for the device."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def luminance(x: Tensor) -> Tensor:
    """Return the brightness of each pixel, (N, 1, H, W)."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
    return red.mul(RED).add_(green, alpha=GREEN).add_(blue, alpha=BLUE)


def scale_brightness_(x: Tensor, factor: Tensor) -> None:
    """Blend with black, in place."""
    x.mul_(factor).clamp_(0, 1)


def scale_contrast_(x: Tensor, factor: Tensor) -> None:
    """Blend with the mean luminance of the image, in place."""
    channels = x.mean(dim=(2, 3), keepdim=True)
    # The mean of the luminance is the luminance of the mean: no image of luminances is made.
    x.mul_(factor).add_(luminance(channels) * (1 - factor)).clamp_(0, 1)


def scale_saturation_(x: Tensor, factor: Tensor) -> None:
    """Blend with the luminance of each pixel, in place; images of one channel have no colour to scale."""
    if x.shape[1] == 3:
        torch.lerp(luminance(x), x, factor, out=x).clamp_(0, 1)


def drop_colour_(x: Tensor, factor: Tensor) -> None:
    """Put the luminance into every channel, in place."""
    if x.shape[1] == 3:
        x.copy_(luminance(x))


def turn_hue_(x: Tensor, turn: Tensor) -> None:
    """Turn the hue by a share of the colour wheel, in place; value and saturation of HSV stay.

    With top and low the largest and smallest channel, the hue's distance from red on the hexagon of HSV is
    1 + (g + b - r - low) / (top - low), in sixths of a turn, towards green where g >= b and towards blue
    elsewhere. A channel whose own hue is d sixths away holds low + (top - low) clamp(2 - d, 0, 1).
    """
    if x.shape[1] == 1:
        return
    red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
    top = torch.maximum(red, green).maximum(blue)
    low = torch.minimum(red, green).minimum(blue)
    spread = top - low
    from_red = (green + blue).sub_(red).sub_(low).div_(spread.clamp(min=SMALLEST_SPREAD))
    hue = from_red.add_(1).div_(6).copysign_(green - blue).add_(turn)
    hue.sub_(hue.floor())
    # In turns. clamp(2 - d, 0, 1) = 2 - clamp(d, 1, 2); red lies at both ends of [0, 1), so its distance is
    # measured from the opposite side, which turns the sign around.
    sixths = spread * 6
    for channel, side, base in (
        (0, 3, top.sub_(spread, alpha=2)),
        (1, 2, low.add_(spread, alpha=2)),
        (2, 4, low),
    ):
        away = hue.sub(side / 6).abs_().clamp_(1 / 6, 2 / 6)
        torch.addcmul(base, sixths, away, value=1 if channel == 0 else -1, out=x[:, channel : channel + 1])


OPERATIONS: tuple[Callable[[Tensor, Tensor], None], ...] = (
    scale_brightness_,
    scale_contrast_,
    scale_saturation_,
    turn_hue_,
    drop_colour_,
)
