import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from vicinal.data import arrays
from vicinal.data.arrays import chunk_length, fitted
from vicinal.errors import ConfigError


def random_images(count: int, channels: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, height, width), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(("height", "width", "size"), [(8, 8, 20), (28, 28, 32), (32, 20, 12)])
def test_resized_as_pillow_does(height: int, width: int, size: int) -> None:
    images = random_images(3, 1, height, width)
    found = fitted(images, size, 1)
    expected = [
        np.array(Image.fromarray(image[0].numpy()).resize((size, size), Image.Resampling.BILINEAR))
        for image in images
    ]
    # Pillow works in fixed point and rounds after each direction.
    assert np.abs(found[:, 0].numpy().astype(int) - np.stack(expected).astype(int)).max() <= 1


def test_gray_is_the_luminance() -> None:
    images = random_images(4, 3, 5, 5)
    expected = [np.array(Image.fromarray(i.permute(1, 2, 0).numpy()).convert("L")) for i in images]
    found = fitted(images, 5, 1)
    assert found.shape == (4, 1, 5, 5)
    assert np.abs(found[:, 0].numpy().astype(int) - np.stack(expected).astype(int)).max() <= 1


def test_one_channel_is_repeated_and_what_fits_is_not_copied() -> None:
    gray, colour = random_images(2, 1, 4, 4), random_images(2, 3, 4, 4)
    three = fitted(gray, 4, 3)
    assert three.shape == (2, 3, 4, 4)
    assert torch.equal(three[:, 2], gray[:, 0])
    assert three.data_ptr() == gray.data_ptr()
    assert fitted(colour, 4, 3).data_ptr() == colour.data_ptr()


def test_chunks_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    images = random_images(7, 3, 6, 6)
    whole = fitted(images, 9, 1)
    monkeypatch.setattr(arrays, "CHUNK_VALUES", 3 * 3 * 9 * 9)
    assert chunk_length(3, 9) == 3
    assert torch.equal(fitted(images, 9, 1), whole)


def test_chunks_hold_one_image_at_least() -> None:
    assert chunk_length(3, 100_000) == 1


@pytest.mark.parametrize(("size", "channels"), [(0, 1), (4, 2)])
def test_impossible_shapes_are_refused(size: int, channels: int) -> None:
    with pytest.raises(ConfigError, match="1 or 3 channels"):
        fitted(random_images(1, 1, 4, 4), size, channels)
