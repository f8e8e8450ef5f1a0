"""A small convolutional net for images of at most 32 px, with any kind of normalization."""

from typing import Literal

from torch import nn

Norm = Literal["batch", "group", "layer", "none"]
WIDTHS = (24, 48, 96)


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(8, channels)
    if kind == "layer":
        return nn.GroupNorm(1, channels)  # one group: layer normalization over channels and space
    return nn.Identity()


def small_features(channels: int, norm: Norm = "batch") -> tuple[nn.Module, int]:
    """Return three convolution blocks ending in a global average, and the width of what they emit."""
    blocks: list[nn.Module] = []
    for index, (before, after) in enumerate(zip((channels, *WIDTHS), WIDTHS, strict=False)):
        blocks += [nn.Conv2d(before, after, 3, padding=1, bias=norm == "none"), _norm(norm, after), nn.ReLU()]
        if index < len(WIDTHS) - 1:
            blocks.append(nn.MaxPool2d(2))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), WIDTHS[-1]
