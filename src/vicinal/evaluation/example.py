"""A target image with the prediction before and after adaptation."""

from dataclasses import dataclass

from torch import Tensor


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
