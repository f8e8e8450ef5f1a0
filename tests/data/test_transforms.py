import numpy as np
import pytest
import torch
from scipy import ndimage

from vicinal.data.transforms import HARDENINGS, to_float
from vicinal.errors import DataError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_to_float_is_a_unit_interval() -> None:
    x = to_float(torch.tensor([0, 51, 255], dtype=torch.uint8), "cpu")
    torch.testing.assert_close(x, torch.tensor([0.0, 0.2, 1.0]))
    with pytest.raises(DataError, match="uint8"):
        to_float(torch.zeros(2), "cpu")


def test_hardenings_are_the_agreed_ones() -> None:
    assert set(HARDENINGS) == {"edges", "inversion", "black_and_white", "posterised", "blurred", "noisy"}


@pytest.mark.parametrize("name", HARDENINGS)
@pytest.mark.parametrize("shape", [(3, 1, 16, 16), (2, 3, 20, 12), (1, 3, 2, 2), (1, 1, 1, 1)])
def test_a_hardening_keeps_shape_and_range_repeats_itself_and_leaves_its_input(
    name: str, shape: tuple[int, ...]
) -> None:
    x = torch.rand(shape, generator=seeded())
    before = x.clone()
    y = HARDENINGS[name](x)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert y.min() >= 0
    assert y.max() <= 1
    assert torch.equal(y, HARDENINGS[name](x))
    assert torch.equal(x, before)
    if x.shape[-1] > 2:
        assert (y - x).abs().mean() > 0.01


def test_edges_agree_with_scipy_and_a_full_step_is_white() -> None:
    x = torch.rand(1, 1, 9, 9, generator=seeded())
    image = x[0, 0].numpy()
    expected = np.hypot(ndimage.sobel(image, 0, mode="nearest"), ndimage.sobel(image, 1, mode="nearest")) / 4
    torch.testing.assert_close(HARDENINGS["edges"](x)[0, 0], torch.from_numpy(expected.clip(0, 1)))
    step = torch.zeros(1, 3, 6, 6)
    step[..., 3:] = 1
    found = HARDENINGS["edges"](step)
    torch.testing.assert_close(found[0, :, 3].amax(dim=-1), torch.ones(3), atol=1e-3, rtol=0)
    assert found[..., 0].max() == 0


def test_inversion_twice_is_the_image() -> None:
    x = torch.rand(1, 3, 4, 4)
    torch.testing.assert_close(HARDENINGS["inversion"](HARDENINGS["inversion"](x)), x)
    assert HARDENINGS["inversion"](torch.zeros(1, 1, 2, 2)).min() == 1


def test_black_and_white_splits_each_image_at_its_own_mean() -> None:
    x = torch.tensor([[0.0, 0.1, 0.2, 0.9], [0.7, 0.8, 0.9, 1.0]]).reshape(2, 1, 2, 2)
    assert HARDENINGS["black_and_white"](x).flatten(1).tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]


def test_posterised_has_four_levels() -> None:
    assert len(HARDENINGS["posterised"](torch.linspace(0, 1, 64).reshape(1, 1, 8, 8)).unique()) == 4


def test_blur_agrees_with_scipy_and_keeps_a_flat_image() -> None:
    x = torch.rand(1, 1, 25, 25, generator=seeded())
    sigma = 0.2 * 5
    expected = ndimage.gaussian_filter(x[0, 0].numpy(), sigma, mode="mirror", radius=3)
    torch.testing.assert_close(HARDENINGS["blurred"](x)[0, 0], torch.from_numpy(expected), atol=1e-5, rtol=0)
    flat = torch.full((1, 3, 16, 16), 0.3)
    torch.testing.assert_close(HARDENINGS["blurred"](flat), flat)


def test_noise_has_its_spread_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    noise = HARDENINGS["noisy"](torch.full((4, 3, 64, 64), 0.5)) - 0.5
    assert torch.equal(torch.rand(3), expected)
    assert noise.mean().item() == pytest.approx(0, abs=0.005)
    assert noise.std().item() == pytest.approx(0.2, abs=0.01)
