"""Target images with the prediction before and after adaptation, as a page shows them."""

import base64

from torch import Tensor

from vicinal.evaluation.example import Example, encode_png

__all__ = ["Example", "image_data_uri"]


def image_data_uri(image: Tensor) -> str:
    """Return a uint8 image of 1 or 3 channels as a PNG data URI, shrunk if larger than it is shown."""
    return "data:image/png;base64," + base64.b64encode(encode_png(image)).decode()
