from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vicinal.data.augment import Augment, Draws, augment_batch, sample_rows
from vicinal.data.fused import ROW, augment_fused

ALL = Augment(min_scale=0.5, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.3, gray=0.3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def levels(shape: tuple[int, int, int, int]) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(3))


def test_rows_for_the_kernels_hold_every_parameter() -> None:
    draws = ALL.draw(6, 20, 20, seeded())
    rows = sample_rows(draws)
    assert rows.shape == (6, len(ROW))
    column = dict(zip(ROW, rows.T, strict=True))
    assert torch.equal(torch.stack([column[name] for name in ROW[:4]], dim=1), draws.boxes.double())
    assert torch.equal(column["hue"], draws.factors[:, 3])
    assert torch.equal(column["gray"].bool(), draws.gray)
    for code, order in zip(column["order"].int().tolist(), draws.order.tolist(), strict=True):
        assert [(code >> (2 * step)) & 3 for step in range(4)] == order
    assert augment_fused(torch.rand(6, 3, 20, 20), rows) is None


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@CUDA
@pytest.mark.parametrize("shape", [(64, 3, 48, 48), (9, 1, 33, 70), (5, 3, 224, 224), (2, 3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_on_cuda_the_same_pixels(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    images = levels(shape)
    images = images if dtype == torch.uint8 else images / 255
    draws = ALL.draw(shape[0], *shape[2:], torch.Generator("cuda").manual_seed(1))
    assert draws.boxes.device.type == "cpu"
    fused = augment_fused(images.cuda(), sample_rows(draws))
    assert fused is not None
    expected = augment_batch(images, draws)
    torch.testing.assert_close(fused.cpu(), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(augment_batch(images.cuda(), draws).cpu(), expected, atol=1e-4, rtol=0)
    assert torch.equal(ALL.apply(images.cuda(), draws), fused)


@CUDA
@pytest.mark.parametrize("run", [ALL.apply, augment_batch])
def test_on_cuda_nothing_waits(run: Callable[[Tensor, Draws], Tensor]) -> None:
    images = levels((24, 3, 48, 48)).cuda()
    draws = ALL.draw(24, 48, 48, seeded())
    run(images, draws)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(images, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
