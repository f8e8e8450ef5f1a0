import itertools
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from vicinal.data import fused_cpu
from vicinal.data.augment import Augment, Draws, augment_batch, augment_rows, sample_rows, unit_interval
from vicinal.data.fused_cpu import augment_fused_cpu

pytest.importorskip("numba", reason="the fused augmentation on the CPU needs the package numba")

ALL = Augment(min_scale=0.5, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.3, gray=0.3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def levels(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(3))


def fused(images: Tensor, draws: Draws) -> Tensor:
    result = augment_fused_cpu(images, sample_rows(draws))
    assert result is not None
    assert result.dtype == torch.float32
    assert result.shape == images.shape
    assert result.is_contiguous()
    return result


def draws_of(count: int, height: int, width: int) -> Draws:
    """Draws that change nothing, to be replaced in part."""
    off = Augment(min_scale=1, max_ratio=1, flip=False)
    return off.draw(count, height, width, seeded())


@pytest.mark.parametrize(
    "shape", [(64, 3, 48, 48), (9, 1, 33, 70), (5, 3, 224, 224), (2, 3, 1, 1), (3, 3, 1, 9)]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_same_pixels_as_the_batch(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    images = levels(*shape)
    images = images if dtype == torch.uint8 else images / 255
    draws = ALL.draw(shape[0], *shape[2:], seeded(1))
    before = images.clone()
    torch.testing.assert_close(fused(images, draws), augment_batch(images, draws), atol=1e-4, rtol=0)
    assert torch.equal(ALL.apply(images, draws), fused(images, draws))
    assert torch.equal(images, before)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_crop_of_bytes_is_within_a_level_of_torchvision(channels: int) -> None:
    images = levels(16, channels, 40, 33)
    draws = Augment(min_scale=0.3).draw(16, 40, 33, seeded(2))
    crops = []
    for image, box, flip in zip(images, draws.boxes.tolist(), draws.flips, strict=True):
        crop = vision.resized_crop(image, *box, size=[40, 33], antialias=True)
        crops.append(vision.horizontal_flip(crop) if flip else crop)
    found = fused(images, draws) * 255
    assert (found.round() - torch.stack(crops)).abs().max() <= 1
    assert (found - augment_rows(images, draws) * 255).abs().max() < 1.01


@pytest.mark.parametrize("channels", [1, 3])
def test_every_order_of_the_four_operations(channels: int) -> None:
    order = torch.tensor(list(itertools.permutations(range(4))))
    images = torch.rand(24, channels, 12, 12, generator=seeded(5))
    factors = torch.tensor([1.4, 0.6, 1.7, -0.35], dtype=torch.float64).expand(24, 4)
    draws = draws_of(24, 12, 12)._replace(order=order, factors=factors)
    found = fused(images, draws)
    torch.testing.assert_close(found, augment_batch(images, draws), atol=1e-5, rtol=0)
    for image, operations, result in zip(images, order.tolist(), found, strict=True):
        expected = image
        for operation in operations:
            if channels == 3 or operation < 2:
                expected = ADJUST[operation](expected, factors[0, operation].item())
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=0)


ADJUST = (vision.adjust_brightness, vision.adjust_contrast, vision.adjust_saturation, vision.adjust_hue)


@pytest.mark.parametrize("turn", [-0.5, -1e-9, 1e-9, 0.25, 0.5])
def test_hues_up_to_half_a_turn_of_all_kinds_of_pixels(turn: float) -> None:
    corners = torch.tensor(list(itertools.product([0.0, 0.25, 0.5, 1.0], repeat=3))).T.reshape(1, 3, 8, 8)
    draws = draws_of(1, 8, 8)._replace(factors=torch.tensor([[1, 1, 1, turn]], dtype=torch.float64))
    expected = vision.adjust_hue(corners, turn)
    torch.testing.assert_close(fused(corners, draws), expected, atol=1e-5, rtol=0)


def test_gray_comes_last_and_extreme_factors_are_held_in_range() -> None:
    images = levels(8, 3, 10, 10)
    factors = (
        torch.tensor([[0.0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0], [50, 9, 30, 0.5]]).double().repeat(2, 1)
    )
    draws = draws_of(8, 10, 10)._replace(factors=factors, gray=torch.arange(8) > 3)
    found = fused(images, draws)
    torch.testing.assert_close(found, augment_batch(images, draws), atol=1e-4, rtol=0)
    assert found.min() >= 0
    assert found.max() <= 1
    assert torch.equal(found[4:, 0], found[4:, 2])


def test_neutral_factors_and_whole_boxes_change_no_bit() -> None:
    bytes_, floats = levels(4, 3, 17, 16), torch.rand(4, 3, 17, 16)
    draws = draws_of(4, 17, 16)
    assert torch.equal(fused(bytes_, draws), unit_interval(bytes_))
    assert torch.equal(fused(floats, draws), floats)
    mirrored = draws._replace(flips=torch.ones(4, dtype=torch.bool))
    assert torch.equal(fused(bytes_, mirrored), unit_interval(bytes_).flip(-1))


def test_the_smallest_boxes_and_those_at_the_edges() -> None:
    images = levels(6, 3, 9, 14)
    boxes = torch.tensor(
        [[0, 0, 1, 1], [8, 13, 1, 1], [3, 5, 1, 1], [0, 4, 9, 1], [8, 0, 1, 14], [7, 12, 2, 2]]
    )
    draws = draws_of(6, 9, 14)._replace(boxes=boxes, flips=torch.arange(6) % 2 == 1)
    found = fused(images, draws)
    torch.testing.assert_close(found, augment_batch(images, draws), atol=1e-5, rtol=0)
    for row, (top, left) in enumerate([(0, 0), (8, 13), (3, 5)]):
        pixel = unit_interval(images[row, :, top, left])
        assert torch.equal(found[row], pixel[:, None, None].expand(3, 9, 14))


@pytest.mark.parametrize(
    "factors", [[1, 1, 1, 0], [1.3, 1, 1, 0], [1, 1, 0.7, 0], [1, 1, 1, 0.2], [1, 0.7, 1, 0]]
)
def test_nan_stays_nan(factors: list[float]) -> None:
    images = torch.rand(2, 3, 6, 6, generator=seeded(1))
    images[0, 1, 2, 3] = math.nan
    table = torch.tensor([factors, factors], dtype=torch.float64)
    draws = draws_of(2, 6, 6)._replace(factors=table)
    found, expected = fused(images, draws), augment_rows(images, draws)
    assert found[0, 1, 2, 3].isnan()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0, equal_nan=True)


def test_an_empty_batch() -> None:
    images = levels(0, 3, 8, 8)
    assert fused(images, ALL.draw(0, 8, 8, seeded())).shape == (0, 3, 8, 8)
    no_pixels = torch.empty(2, 3, 0, 8)
    assert augment_fused_cpu(no_pixels, sample_rows(draws_of(2, 0, 8))) is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_strided_images(dtype: torch.dtype) -> None:
    images = levels(6, 3, 20, 11).to(dtype) / (1 if dtype == torch.uint8 else 255)
    images = images.to(dtype)
    draws = ALL.draw(6, 20, 11, seeded())
    expected = fused(images, draws)
    last = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert not last.is_contiguous()
    assert torch.equal(fused(last, draws), expected)
    every_other = torch.stack([images, images], dim=1).flatten(0, 1)[::2]
    assert torch.equal(fused(every_other, draws), expected)
    same = images[:1].expand(6, 3, 20, 11)
    assert torch.equal(fused(same, draws), fused(same.clone(), draws))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_read_only_memory_map(tmp_path: Path) -> None:
    images = levels(4, 3, 16, 16)
    images.numpy().tofile(tmp_path / "images")
    mapped = np.memmap(tmp_path / "images", np.uint8, mode="r", shape=(4, 3, 16, 16))
    draws = ALL.draw(4, 16, 16, seeded())
    assert torch.equal(fused(torch.from_numpy(mapped), draws), fused(images, draws))
    assert (tmp_path / "images").read_bytes() == images.numpy().tobytes()


def test_images_that_need_a_gradient_and_floats_of_other_widths() -> None:
    images = torch.rand(3, 3, 8, 8, generator=seeded())
    draws = ALL.draw(3, 8, 8, seeded())
    expected = fused(images, draws)
    assert torch.equal(fused(images.clone().requires_grad_(), draws), expected)
    assert torch.equal(fused(images.double(), draws), expected)
    torch.testing.assert_close(fused(images.half(), draws), expected, atol=0.05, rtol=0)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_the_same_bits_whatever_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_cpu, "LEAST_PER_THREAD", 1)
    images, draws = levels(13, 3, 40, 36), ALL.draw(13, 40, 36, seeded())
    torch.set_num_threads(1)
    expected = fused(images, draws)
    for count in (2, 3, 5, 16):
        torch.set_num_threads(count)
        assert torch.equal(fused(images, draws), expected)
        assert torch.get_num_threads() == count
    alone = [fused(images[n : n + 1], Draws(*(part[n : n + 1] for part in draws))) for n in range(13)]
    assert torch.equal(torch.cat(alone), expected)


def test_calls_from_several_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_cpu, "LEAST_PER_THREAD", 1)
    images = levels(12, 3, 40, 40)
    draws = [ALL.draw(12, 40, 40, seeded(seed)) for seed in range(16)]
    expected = [fused(images, draw) for draw in draws]
    with ThreadPoolExecutor(4) as executor:
        found = list(executor.map(lambda draw: fused(images, draw), draws))
    assert all(map(torch.equal, found, expected))


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_cpu, "LEAST_PER_THREAD", 1)
    images, draws = levels(4, 3, 12, 12), ALL.draw(4, 12, 12, seeded())
    expected = fused(images, draws).numpy().tobytes()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(fused(images, draws).numpy().tobytes() == expected))
    child.start()
    child.join(timeout=20)
    assert child.exitcode == 0
    assert queue.get()


def test_closed_for_what_it_cannot_do() -> None:
    rows = sample_rows(ALL.draw(2, 8, 8, seeded()))
    assert augment_fused_cpu(torch.rand(2, 5, 8, 8), rows) is None
    assert augment_fused_cpu(torch.rand(3, 3, 8, 8), rows) is None
    for column, value in ((0, -1), (1, 8), (2, 0), (2, 9), (3, math.nan)):
        outside = rows.clone()
        outside[1, column] = value
        assert augment_fused_cpu(torch.rand(2, 3, 8, 8), outside) is None


@pytest.fixture
def forgotten() -> Iterator[None]:
    fused_cpu._kernel.cache_clear()
    yield
    fused_cpu._kernel.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_without_numba_the_other_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vicinal.data.fused_cpu_kernel", None)
    images, draws = levels(3, 3, 12, 12), ALL.draw(3, 12, 12, seeded())
    assert augment_fused_cpu(images, sample_rows(draws)) is None
    assert torch.equal(ALL.apply(images, draws), augment_rows(images, draws))


def test_compiles_where_nothing_can_be_kept() -> None:
    from vicinal.data.fused_cpu_kernel import OPTIONS, compiled, kept_on_disk

    # Code that comes from no file has no place on the disk, as in a folder that cannot be written.
    names: dict[str, Callable[[float], float]] = {}
    exec("def double(x): return 2 * x", names)
    with pytest.raises(RuntimeError, match="cannot cache"):
        compiled(names["double"], OPTIONS | {"cache": True})
    assert kept_on_disk(names["double"])(3.0) == 6.0
