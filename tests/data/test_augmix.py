import dataclasses
import math

import pytest
import torch
from scipy import stats
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from vicinal.data.augment import Augment
from vicinal.data.augmix import NOTHING, OPERATIONS, AugMix, MixDraws, magnitude_table, run_steps_
from vicinal.errors import ConfigError, DataError

PLAIN = AugMix(crop=None)
TORCHVISION = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
TORCHVISION += ("Posterize", "Solarize", "AutoContrast", "Equalize")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth(count: int, channels: int = 3, height: int = 24, width: int = 30) -> Tensor:
    coarse = torch.rand(count, channels, 6, 6, generator=seeded(1))
    return torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")


def by_torchvision(image: Tensor, operation: int, magnitude: float) -> Tensor:
    result: Tensor = v2.AugMix()._apply_image_or_video_transform(
        image, TORCHVISION[operation], magnitude, interpolation=InterpolationMode.BILINEAR, fill={}
    )
    return result


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", range(len(OPERATIONS)), ids=OPERATIONS)
def test_each_operation_is_torchvisions_at_every_magnitude(operation: int, channels: int) -> None:
    x = smooth(20, channels)
    signs = torch.tensor([1.0, -1.0 if operation < 5 else 1.0])
    magnitudes = (magnitude_table(24, 30)[operation] * signs.unsqueeze(1)).flatten()
    pairs = zip(x, magnitudes, strict=True)
    expected = torch.stack([by_torchvision(image, operation, value.item()) for image, value in pairs])
    run_steps_(x, torch.full((20, 1), operation), magnitudes.unsqueeze(1))
    torch.testing.assert_close(x, expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize("size", [(24, 30), (224, 200)])
def test_magnitudes_are_torchvisions(size: tuple[int, int]) -> None:
    space = v2.AugMix._PARTIAL_AUGMENTATION_SPACE
    assert tuple(space) == TORCHVISION
    for row, name in zip(magnitude_table(*size), TORCHVISION, strict=True):
        expected = space[name][0](10, *size)
        if name.startswith("Translate"):
            expected = expected.trunc()
        if expected is not None:
            torch.testing.assert_close(row, expected.double(), atol=1e-7, rtol=0)


def mixed_by_torchvision(image: Tensor, draws: MixDraws, row: int) -> Tensor:
    mixed = draws.weights[row, 0].float() * image
    for chain in range(draws.operations.shape[1]):
        x = image
        steps = zip(draws.operations[row, chain].tolist(), draws.magnitudes[row, chain].tolist(), strict=True)
        for operation, magnitude in steps:
            x = x if operation == NOTHING else by_torchvision(x, operation, magnitude)
        mixed = mixed + draws.weights[row, 1 + chain].float() * x
    return mixed


@pytest.mark.parametrize("mix", [PLAIN, AugMix(severity=10, width=2, depth=2, crop=None)])
def test_mixtures_equal_torchvision_on_the_same_parameters(mix: AugMix) -> None:
    x = smooth(20)
    draws = mix.draw(20, 24, 30, seeded(2))
    expected = torch.stack([mixed_by_torchvision(image, draws, row) for row, image in enumerate(x)])
    away = (mix.apply(x, draws) - expected).abs()
    # Posterize, solarize and equalize jump: a pixel a rounding error away from the jump falls on either side.
    assert (away < 1e-4).double().mean() > 0.998
    assert away.mean() < 1e-4


def test_draws_have_torchvisions_distribution() -> None:
    draws = AugMix(severity=3, alpha=0.5, crop=None).draw(4000, 30, 30, seeded())
    used = draws.operations[draws.operations >= 0]
    assert stats.chisquare(used.unique(return_counts=True)[1]).pvalue > 1e-3
    depths = (draws.operations >= 0).sum(dim=2).flatten()
    assert sorted(depths.unique().tolist()) == [1, 2, 3]
    assert stats.chisquare(depths.unique(return_counts=True)[1]).pvalue > 1e-3
    assert torch.equal(draws.operations[..., 0] >= 0, torch.ones(4000, 3, dtype=torch.bool))
    torch.testing.assert_close(draws.weights.sum(dim=1), torch.ones(4000, dtype=torch.float64))
    assert stats.kstest(draws.weights[:, 0], stats.beta(0.5, 0.5).cdf).pvalue > 1e-3
    share = draws.weights[:, 1] / (1 - draws.weights[:, 0]).clamp(min=1e-12)
    assert stats.kstest(share, stats.beta(0.5, 1.0).cdf).pvalue > 1e-3
    angles = draws.magnitudes[draws.operations == OPERATIONS.index("rotate")]
    assert angles.unique().tolist() == pytest.approx([-20 / 3, -10 / 3, 0, 10 / 3, 20 / 3], abs=1e-5)
    assert (draws.magnitudes[draws.operations >= 5] >= 0).all()


def test_moments_are_those_of_torchvisions_augmix() -> None:
    image = smooth(1, 3, 12, 12)
    found = AugMix(severity=10, crop=None)(image.expand(300, 3, 12, 12), seeded(3))
    torch.manual_seed(0)
    reference = v2.AugMix(severity=10, all_ops=False)
    expected = torch.stack([reference(image[0]) for _ in range(300)])
    for part in ("mean", "std"):
        values = (getattr(images.flatten(1), part)(dim=1) for images in (found, expected))
        assert stats.ks_2samp(*values).pvalue > 1e-3
    away = [(images - image).flatten(1).norm(dim=1) for images in (found, expected)]
    assert stats.ks_2samp(*away).pvalue > 1e-3


def test_crop_and_flip_come_first() -> None:
    x = smooth(9, 3, 16, 16)
    mix = AugMix(crop=Augment(min_scale=0.2))
    draws = mix.draw(9, 16, 16, seeded())
    assert draws.crop is not None
    cropped = Augment().apply(x, draws.crop)
    assert torch.equal(mix.apply(x, draws), PLAIN.apply(cropped, draws._replace(crop=None)))
    assert (cropped - x).abs().mean() > 0.02


def test_bytes_floats_dtypes_ranges_and_inputs() -> None:
    x = (smooth(11, 3, 12, 12) * 255).to(torch.uint8)
    before = x.clone()
    found = AugMix(severity=10)(x, seeded(1))
    assert torch.equal(x, before)
    assert found.dtype == torch.float32
    torch.testing.assert_close(PLAIN(x, seeded(1)), PLAIN(x / 255, seeded(1)))
    assert found.min() >= 0
    assert found.max() <= 1 + 1e-6
    assert AugMix()((x / 255).double(), seeded()).dtype == torch.float64
    assert AugMix()(x[:0], seeded()).shape == (0, 3, 12, 12)
    assert AugMix()(x[:1, :1], seeded()).shape == (1, 1, 12, 12)


def test_seeded_and_different_for_each_sample() -> None:
    x = smooth(1, 3, 12, 12).expand(4, 3, 12, 12)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    y = AugMix()(x, seeded(1))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(y, AugMix()(x, seeded(1)))
    assert not torch.equal(y, AugMix()(x, seeded(2)))
    assert len({sample.numpy().tobytes() for sample in y}) == 4


@pytest.mark.parametrize(
    "settings",
    [{"severity": 0}, {"severity": 11}, {"width": 0}, {"depth": 0}, {"alpha": 0}, {"alpha": math.nan}],
)
def test_settings_out_of_range_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        AugMix(**settings)  # type: ignore[arg-type]


def test_wrong_images_are_refused_and_values_are_plain() -> None:
    draws = PLAIN.draw(2, 8, 8, seeded())
    with pytest.raises(DataError, match=r"1 or 3"):
        PLAIN.apply(torch.rand(2, 2, 8, 8), draws)
    with pytest.raises(DataError, match="2 draws for 3 images"):
        PLAIN.apply(torch.rand(3, 3, 8, 8), draws)
    assert dataclasses.asdict(AugMix())["crop"]["min_scale"] == 0.08
    assert AugMix() == AugMix()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_same_pixels_without_waiting() -> None:
    x = (smooth(24, 3, 32, 32) * 255).to(torch.uint8)
    draws = AugMix().draw(24, 32, 32, torch.Generator("cuda").manual_seed(1))
    moved = x.cuda()
    AugMix().apply(moved, draws)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = AugMix().apply(moved, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ((found.cpu() - AugMix().apply(x, draws)).abs() < 0.02).double().mean() > 0.9
    draws = draws._replace(crop=None)
    away = (AugMix().apply(moved, draws).cpu() - AugMix().apply(x, draws)).abs()
    assert (away < 1e-3).double().mean() > 0.995
