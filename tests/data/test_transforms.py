import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from vicinal.data.transforms import HARDENINGS, Augment, to_float
from vicinal.errors import ConfigError, DataError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ramps(count: int, side: int) -> torch.Tensor:
    """Two channels that hold their own x and y coordinate, so that a crop can be read off its output."""
    axis = (torch.arange(side) + 0.5) / side
    image = torch.stack([axis.expand(side, side), axis.unsqueeze(1).expand(side, side)])
    return image.expand(count, 2, side, side)


def test_to_float_is_a_unit_interval() -> None:
    x = to_float(torch.tensor([0, 51, 255], dtype=torch.uint8), "cpu")
    torch.testing.assert_close(x, torch.tensor([0.0, 0.2, 1.0]))
    with pytest.raises(DataError, match="uint8"):
        to_float(torch.zeros(2), "cpu")


def test_identity_when_nothing_may_change() -> None:
    x = torch.rand(3, 1, 5, 7)
    assert torch.equal(Augment(min_scale=1, max_ratio=1, flip=False)(x, seeded()), x)


def test_flip_alone_gives_each_sample_or_its_mirror_image() -> None:
    x = torch.rand(64, 3, 6, 5)
    y = Augment(min_scale=1, max_ratio=1, flip=True)(x, seeded())
    same = torch.isclose(x, y, atol=1e-5).flatten(1).all(dim=1)
    mirrored = torch.isclose(x.flip(-1), y, atol=1e-5).flatten(1).all(dim=1)
    assert (same ^ mirrored).all()
    assert 16 < mirrored.sum() < 48


def test_seeded_and_different_for_each_sample() -> None:
    x = torch.rand(1, 3, 8, 8).expand(4, 3, 8, 8)
    y = Augment()(x, seeded(1))
    assert torch.equal(y, Augment()(x, seeded(1)))
    assert not torch.equal(y, Augment()(x, seeded(2)))
    assert len({sample.numpy().tobytes() for sample in y}) == 4
    generator = seeded(1)
    first = Augment()(x, generator)
    assert not torch.equal(first, Augment()(x, generator))


def test_crops_stay_inside_and_have_the_promised_area_and_ratio() -> None:
    side, augment = 32, Augment(min_scale=0.5, max_ratio=1.5, flip=False)
    y = augment(ramps(2000, side), seeded())
    inner = slice(2, side - 2)
    width = (y[:, 0, 5, inner].diff(dim=-1) * side).mean(dim=-1)
    height = (y[:, 1, inner, 5].diff(dim=-1) * side).mean(dim=-1)
    area, ratio = width * height, width / height
    assert width.max() <= 1.001
    assert height.max() <= 1.001
    assert 0.999 / 1.5 <= ratio.min() < 0.7
    assert 1.4 < ratio.max() <= 1.501
    # A wide crop is cut to the frame, so the smallest area is below min_scale only by that cut.
    assert area.min() > 0.5 / 1.5 * 0.999
    assert area.mean().item() == pytest.approx(0.72, abs=0.02)
    centre = y.mean(dim=(-2, -1))
    assert centre.mean().item() == pytest.approx(0.5, abs=0.01)
    assert centre.std() > 0.02


def test_a_crop_is_bilinear_as_in_scipy() -> None:
    side, augment = 12, Augment(min_scale=0.5, flip=False)
    x = torch.rand(1, 1, side, side, generator=seeded(9))
    where = augment(ramps(1, side), seeded(4))[0].numpy() * side - 0.5
    expected = ndimage.map_coordinates(x[0, 0].numpy(), where[::-1], order=1, mode="nearest")
    # The rim is left out: there the ramps are clamped to the outermost pixels and no longer tell the place.
    inner = slice(1, -1)
    found = augment(x, seeded(4))[0, 0].numpy()
    np.testing.assert_allclose(found[inner, inner], expected[inner, inner], atol=1e-4)
    assert np.abs(found - x[0, 0].numpy()).mean() > 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_augment_keeps_the_dtype(dtype: torch.dtype) -> None:
    x = torch.rand(2, 1, 8, 8)
    y = Augment()(x.to(dtype), seeded())
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), Augment()(x, seeded()), atol=0.01, rtol=0)


def test_augment_of_an_odd_batch() -> None:
    assert Augment()(torch.rand(1, 1, 1, 1), seeded()).shape == (1, 1, 1, 1)
    assert Augment()(torch.rand(1, 3, 5, 9), seeded()).shape == (1, 3, 5, 9)


@pytest.mark.parametrize(
    "settings", [{"min_scale": 0.0}, {"min_scale": 1.1}, {"max_ratio": 0.9}, {"max_ratio": math.inf}]
)
def test_augment_refuses_settings_out_of_range(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Augment(**settings)


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
