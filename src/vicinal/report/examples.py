"""Target images with the prediction before and after adaptation."""

import base64
import io

from PIL import Image
from torch import Tensor

from vicinal.errors import DataError
from vicinal.evaluation.example import Example

__all__ = ["Example", "image_data_uri"]

# Twice the size an image is shown at, for sharp screens; a page with fifty examples stays small.
_MAX_SIDE = 192


def image_data_uri(image: Tensor) -> str:
    """Return a uint8 image of 1 or 3 channels as a PNG data URI, shrunk if larger than it is shown."""
    if image.ndim != 3 or image.shape[0] not in (1, 3) or str(image.dtype) != "torch.uint8":
        raise DataError(
            f"an example needs a uint8 image (1 or 3, H, W), got {image.dtype} {tuple(image.shape)}"
        )
    pixels = image.detach().cpu().permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels[:, :, 0] if image.shape[0] == 1 else pixels)
    picture.thumbnail((_MAX_SIDE, _MAX_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
