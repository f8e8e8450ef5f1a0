import colorsys

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from vicinal.data import colour
from vicinal.data.colour import jitter_, operation_groups
from vicinal.errors import DataError

BY_TORCHVISION = (
    vision.adjust_brightness,
    vision.adjust_contrast,
    vision.adjust_saturation,
    vision.adjust_hue,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def awkward(count: int, channels: int = 3) -> Tensor:
    """Random colours, many of them with equal channels, black, white, or barely coloured."""
    x = torch.randint(0, 4, (count, channels, 16, 16), generator=seeded(1)) / 3
    x[:, :, 8:] = torch.rand(count, channels, 8, 16, generator=seeded(2))
    x[:, :, 12:14] = x[:, :1, 12:14] + 1e-6 * x[:, :, 12:14]
    return x.clamp(0, 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", range(4))
def test_each_operation_is_torchvisions(operation: int, channels: int) -> None:
    factors = (
        torch.tensor([-0.5, -0.2, 0.0, 0.1, 0.5]) if operation == colour.HUE else torch.linspace(0, 2, 5)
    )
    x = awkward(5, channels)
    expected = torch.stack(
        [BY_TORCHVISION[operation](image, factor.item()) for image, factor in zip(x, factors, strict=True)]
    )
    colour.OPERATIONS[operation](x, factors.view(-1, 1, 1, 1))
    torch.testing.assert_close(x, expected, atol=2e-6, rtol=0)


def test_hue_turns_as_colorsys_does() -> None:
    colours = torch.rand(1, 3, 6, 6, generator=seeded(3))
    found = colours.clone()
    colour.turn_hue_(found, torch.full((1, 1, 1, 1), 0.3))
    for pixel, turned in zip(colours[0].flatten(1).T.tolist(), found[0].flatten(1).T, strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        expected = colorsys.hsv_to_rgb((hue + 0.3) % 1, saturation, value)
        torch.testing.assert_close(turned, torch.tensor(expected), atol=2e-6, rtol=0)


def test_grayscale_is_torchvisions() -> None:
    x = awkward(2)
    expected = vision.rgb_to_grayscale(x, num_output_channels=3)
    colour.drop_colour_(x, torch.ones(2, 1, 1, 1))
    torch.testing.assert_close(x, expected, atol=1e-6, rtol=0)


def random_chains(count: int) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.rand(count, 9, generator=seeded(5), dtype=torch.float64)
    factors = torch.cat([chance[:, 4:7] + 0.5, chance[:, 7:8] - 0.5], dim=1)
    factors[::7, 0], factors[1::7, 1], factors[2::7, 2], factors[3::7, 3] = 1, 1, 1, 0
    return chance[:, :4].argsort(dim=1), factors, chance[:, 8] < 0.3


def test_a_batch_of_mixed_orders_equals_its_samples_alone() -> None:
    x = awkward(40)
    order, factors, gray = random_chains(40)
    alone = []
    for row, image in enumerate(x.clone()):
        for operation in order[row].tolist():
            image = BY_TORCHVISION[operation](image, factors[row, operation].item())
        alone.append(vision.rgb_to_grayscale(image, 3) if gray[row] else image)
    torch.testing.assert_close(jitter_(x, order, factors, gray), torch.stack(alone), atol=2e-5, rtol=0)


def test_groups_keep_each_samples_order_and_leave_out_what_changes_nothing() -> None:
    order = [[0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3]]
    table = [[0.5, 1.0, 1.0, 0.1, 1.0], [0.5, 0.7, 1.0, 0.1, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0]]
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for operation, samples in operation_groups(order, table):
        for sample in samples:
            found[sample].append(operation)
    assert found == {0: [0, 3, 4], 1: [3, 1, 0], 2: []}


def test_neutral_factors_return_the_same_pixels() -> None:
    x = awkward(3)
    neutral = torch.tensor(colour.NEUTRAL[:4], dtype=torch.float64).expand(3, 4)
    found = jitter_(x.clone(), torch.arange(4).expand(3, 4), neutral, torch.zeros(3, dtype=torch.bool))
    assert torch.equal(found, x)


def test_two_channels_are_refused() -> None:
    with pytest.raises(DataError, match="1 or 3 channels"):
        jitter_(torch.rand(2, 2, 4, 4), *random_chains(2))
