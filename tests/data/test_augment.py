import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import ndimage, stats
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as vision

from vicinal.data.augment import Augment, Draws, augment_batch, augment_rows
from vicinal.errors import ConfigError, DataError

COLOURS = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.3, "gray": 0.3}
ALL = Augment(min_scale=0.5, **COLOURS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photos(count: int, channels: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Smooth uint8 images with black and white in them, as photographs are."""
    coarse = torch.rand(count, channels, 5, 5, generator=seeded(seed)) * 1.4 - 0.2
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    return (smooth.clamp(0, 1) * 255).round().to(torch.uint8)


def by_torchvision(image: Tensor, draws: Draws, row: int) -> Tensor:
    """One image (C, H, W) under torchvision's functions with the parameters of this row."""
    top, left, height, width = draws.boxes[row].tolist()
    x = vision.resized_crop(image, top, left, height, width, list(image.shape[-2:]), antialias=True)
    x = vision.horizontal_flip(x) if draws.flips[row] else x
    adjust = (vision.adjust_brightness, vision.adjust_contrast, vision.adjust_saturation, vision.adjust_hue)
    for operation in draws.order[row].tolist():
        factor = draws.factors[row, operation].item()
        # ColorJitter leaves out what is switched off; on bytes even a factor of one would round.
        x = x if factor == (0 if operation == 3 else 1) else adjust[operation](x, factor)
    return vision.rgb_to_grayscale(x, num_output_channels=len(image)) if draws.gray[row] else x


@pytest.mark.parametrize("run", [augment_rows, augment_batch])
@pytest.mark.parametrize("shape", [(24, 3, 32, 32), (24, 3, 21, 34), (12, 1, 30, 19)])
def test_equal_to_torchvision_on_floats(
    run: Callable[[Tensor, Draws], Tensor], shape: tuple[int, int, int, int]
) -> None:
    images = torch.rand(shape, generator=seeded(3))
    draws = ALL.draw(shape[0], *shape[2:], seeded(4))
    expected = torch.stack([by_torchvision(image, draws, row) for row, image in enumerate(images)])
    found = run(images, draws)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert (found - images).abs().mean() > 0.05


@pytest.mark.parametrize("run", [augment_rows, augment_batch])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_crop_of_bytes_is_within_a_level_of_torchvision(
    run: Callable[[Tensor, Draws], Tensor], channels: int
) -> None:
    images = torch.randint(0, 256, (16, channels, 40, 33), dtype=torch.uint8, generator=seeded(1))
    draws = Augment(min_scale=0.3).draw(16, 40, 33, seeded(2))
    expected = torch.stack([by_torchvision(image, draws, row) for row, image in enumerate(images)])
    levels = run(images, draws) * 255
    if run is augment_rows:
        torch.testing.assert_close(levels, expected.float(), atol=1e-4, rtol=0)
    # torchvision rounds after the columns and again after the rows; the batch is not rounded at all.
    assert (levels - expected).abs().max() < 1.01
    assert (levels.round() - expected).abs().max() <= 1
    assert (levels - expected).abs().mean() < 0.3


def test_a_whole_chain_on_bytes_is_within_what_torchvision_loses_by_rounding() -> None:
    # torchvision cuts to whole levels after each of six operations; later factors of up to 1.4 enlarge that.
    images = photos(48, 3, 32, 32)
    draws = ALL.draw(48, 32, 32, seeded(5))
    expected = torch.stack([by_torchvision(image, draws, row) for row, image in enumerate(images)])
    away = (ALL.apply(images, draws) * 255 - expected).abs()
    assert away.max() <= 8
    assert away.mean() < 1.5
    in_floats = torch.stack([by_torchvision(image / 255, draws, row) for row, image in enumerate(images)])
    torch.testing.assert_close(augment_batch(images, draws), in_floats, atol=2e-5, rtol=0)


@pytest.mark.parametrize("size", [(32, 32), (224, 224), (20, 60), (7, 5)])
def test_boxes_are_distributed_as_in_torchvision(size: tuple[int, int]) -> None:
    augment = Augment(min_scale=0.3, max_ratio=1.5)
    found = augment.draw(3000, *size, seeded(1)).boxes
    torch.manual_seed(0)
    reference = v2.RandomResizedCrop(size, scale=(0.3, 1.0), ratio=(1 / 1.5, 1.5))
    image = torch.zeros(3, *size)
    rows = [reference.make_params([image]) for _ in range(3000)]
    expected = torch.tensor([[row[key] for key in ("top", "left", "height", "width")] for row in rows])
    assert (found[:, :2] >= 0).all()
    assert (found[:, :2] + found[:, 2:] <= torch.tensor(size)).all()
    for column in range(4):
        assert stats.ks_2samp(found[:, column], expected[:, column]).pvalue > 1e-3
    np.testing.assert_allclose(
        np.corrcoef(found.double().T.numpy()), np.corrcoef(expected.double().T.numpy()), atol=0.09
    )


@pytest.mark.parametrize(("height", "width"), [(10, 90), (90, 10), (40, 40)])
def test_the_central_box_where_nothing_fits_is_torchvisions(height: int, width: int) -> None:
    # Ratio 1 and almost the whole area: no square of that area fits into an oblong image.
    augment = Augment(min_scale=0.999, max_ratio=1)
    reference = v2.RandomResizedCrop((height, width), scale=(0.999, 1.0), ratio=(1.0, 1.0))
    row = reference.make_params([torch.zeros(3, height, width)])
    expected = [row[key] for key in ("top", "left", "height", "width")]
    assert augment.draw(5, height, width, seeded()).boxes.tolist() == [expected] * 5


def test_colours_are_distributed_as_in_torchvision() -> None:
    draws = Augment(brightness=0.4, contrast=1.5, saturation=0.3, hue=0.2, gray=0.3).draw(
        4000, 8, 8, seeded()
    )
    torch.manual_seed(0)
    jitter, image = v2.ColorJitter(0.4, 1.5, 0.3, 0.2), torch.zeros(3, 8, 8)
    rows = [jitter.make_params([image]) for _ in range(4000)]
    for column, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        expected = [row[f"{name}_factor"] for row in rows]
        assert stats.ks_2samp(draws.factors[:, column], expected).pvalue > 1e-3
    codes = draws.order @ torch.tensor([64, 16, 4, 1])
    counts = codes.unique(return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3
    assert draws.gray.double().mean().item() == pytest.approx(0.3, abs=0.03)
    assert draws.flips.double().mean().item() == pytest.approx(0.5, abs=0.03)


def test_moments_of_the_images_are_those_of_torchvisions_pipeline() -> None:
    image = photos(1, 3, 16, 16, seed=7)
    augment = Augment(min_scale=0.4, **COLOURS)
    found = features(augment(image.expand(400, 3, 16, 16), seeded()))
    torch.manual_seed(0)
    reference = v2.Compose(
        [
            v2.ToDtype(torch.float32, scale=True),
            v2.RandomResizedCrop(16, scale=(0.4, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.3),
            v2.RandomGrayscale(0.3),
        ]
    )
    expected = features(torch.stack([reference(image[0]) for _ in range(400)]))
    for name, values in found.items():
        assert stats.ks_2samp(values, expected[name]).pvalue > 1e-3, name


def features(images: Tensor) -> dict[str, Tensor]:
    """A few numbers for each image that a wrong crop, flip, factor or gray share would shift."""
    left, right = images.chunk(2, dim=3)
    return {
        "mean": images.mean(dim=(1, 2, 3)),
        "spread": images.flatten(1).std(dim=1),
        "sideways": left.mean(dim=(1, 2, 3)) - right.mean(dim=(1, 2, 3)),
        "colour": images[:, 0].mean(dim=(1, 2)) - images[:, 2].mean(dim=(1, 2)),
        "detail": images.diff(dim=3).abs().mean(dim=(1, 2, 3)),
    }


def test_identity_when_nothing_may_change() -> None:
    off = Augment(min_scale=1, max_ratio=1, flip=False)
    x = torch.rand(3, 1, 5, 7)
    assert off(x, seeded()) is x
    draws = off.draw(3, 5, 7, seeded())
    assert torch.equal(off.apply(x, draws), x)
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(off(levels, seeded()), levels.float() / 255)


def test_flip_alone_gives_each_sample_or_its_mirror_image() -> None:
    x = torch.rand(64, 3, 6, 5)
    y = Augment(min_scale=1, max_ratio=1, flip=True)(x, seeded())
    same = (x == y).flatten(1).all(dim=1)
    mirrored = (x.flip(-1) == y).flatten(1).all(dim=1)
    assert (same ^ mirrored).all()
    assert 16 < mirrored.sum() < 48


def test_seeded_and_different_for_each_sample() -> None:
    x = torch.rand(1, 3, 8, 8).expand(4, 3, 8, 8)
    y = ALL(x, seeded(1))
    assert torch.equal(y, ALL(x, seeded(1)))
    assert not torch.equal(y, ALL(x, seeded(2)))
    assert len({sample.numpy().tobytes() for sample in y}) == 4
    generator = seeded(1)
    first = ALL(x, generator)
    assert not torch.equal(first, ALL(x, generator))


def test_the_global_generator_and_the_input_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for x in (torch.rand(4, 3, 8, 8, generator=seeded()), photos(4, 3, 8, 8)):
        before = x.clone()
        ALL(x, seeded())
        Augment(min_scale=1, max_ratio=1, flip=False, **COLOURS)(x, seeded())
        assert torch.equal(x, before)
    assert torch.equal(torch.rand(3), expected)


def test_a_crop_is_bilinear_as_in_scipy() -> None:
    x = torch.rand(1, 1, 12, 12, generator=seeded(9))
    augment = Augment(min_scale=0.5, flip=False)
    draws = augment.draw(1, 12, 12, seeded(4))
    top, left, height, width = draws.boxes[0].tolist()
    assert height < 12 > width
    down, across = ((np.arange(12) + 0.5) * side / 12 - 0.5 for side in (height, width))
    box = x[0, 0, top : top + height, left : left + width].numpy()
    where = np.meshgrid(down, across, indexing="ij")
    expected = ndimage.map_coordinates(box, where, order=1, mode="nearest")
    np.testing.assert_allclose(augment.apply(x, draws)[0, 0].numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_augment_keeps_the_dtype_of_floats(dtype: torch.dtype) -> None:
    x = torch.rand(2, 1, 8, 8)
    y = Augment()(x.to(dtype), seeded())
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), Augment()(x, seeded()), atol=0.01, rtol=0)


@pytest.mark.parametrize("run", [augment_rows, augment_batch])
def test_augment_of_an_odd_batch(run: Callable[[Tensor, Draws], Tensor]) -> None:
    for shape in ((1, 1, 1, 1), (1, 3, 5, 9), (0, 3, 8, 8), (2, 3, 1, 6)):
        draws = ALL.draw(shape[0], *shape[2:], seeded())
        assert run(torch.rand(shape), draws).shape == shape


def test_strided_images_and_any_number_of_channels_for_crops() -> None:
    x = photos(4, 3, 10, 10)
    strided = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert torch.equal(ALL(strided, seeded()), ALL(x, seeded()))
    assert Augment()(torch.rand(2, 5, 8, 8), seeded()).shape == (2, 5, 8, 8)
    with pytest.raises(DataError, match="channels, got 5"):
        ALL(torch.rand(2, 5, 8, 8), seeded())


def test_refuses_what_is_no_batch_of_images() -> None:
    draws = ALL.draw(2, 8, 8, seeded())
    with pytest.raises(DataError, match="shape"):
        ALL.apply(torch.rand(3, 8, 8), draws)
    with pytest.raises(DataError, match="int64"):
        ALL.apply(torch.zeros(2, 3, 8, 8, dtype=torch.int64), draws)
    with pytest.raises(DataError, match="2 draws for 3 images"):
        ALL.apply(torch.rand(3, 3, 8, 8), draws)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_scale": 0.0},
        {"min_scale": 1.1},
        {"max_ratio": 0.9},
        {"max_ratio": math.inf},
        {"max_ratio": math.nan},
        {"brightness": -0.1},
        {"contrast": math.inf},
        {"saturation": math.nan},
        {"hue": 0.6},
        {"hue": -0.1},
        {"gray": 1.1},
    ],
)
def test_augment_refuses_settings_out_of_range(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Augment(**settings)  # type: ignore[arg-type]


def test_a_plain_value_that_survives_a_config_file() -> None:
    assert Augment(**dataclasses.asdict(ALL)) == ALL
    assert hash(Augment()) == hash(Augment(min_scale=0.8))
