"""Every kernel compiles for real GPUs: that needs none of them, only the compiler that torch for CUDA has."""

import pytest
import torch
from torch.cuda import _utils

from vicinal.adapters import bookkeeping, norm_kernels, reading
from vicinal.data import fused
from vicinal.kernels import constant, suited, with_constants
from vicinal.models import pool_kernels

TEXTS = {
    "average": bookkeeping.source(),
    "renormalize": bookkeeping.source(),
    **dict.fromkeys(norm_kernels.NAMES, norm_kernels.source()),
    "read_stream": reading.source(),
    "measure": fused.source(whole_levels=True, channels=3),
    "augment": fused.source(whole_levels=False, channels=1),
    "pool_forward": pool_kernels.source(pool_kernels.Geometry(3, 3, 2, 2, 1, 1), half=True, lanes=8),
    "pool_backward": pool_kernels.source(pool_kernels.Geometry(5, 4, 3, 1, 2, 0), half=True, lanes=1),
}


@pytest.mark.parametrize("capability", ["75", "80", "90"])
@pytest.mark.parametrize("name", TEXTS)
def test_it_compiles(name: str, capability: str) -> None:
    try:
        _utils._get_gpu_rtc_library()
    except (AttributeError, OSError) as error:
        pytest.skip(f"torch has no such compiler here: {error}")
    code, mangled = _utils._nvrtc_compile(TEXTS[name], name, compute_capability=capability)
    assert (len(code) > 0, mangled) == (True, name)


def test_constants_come_before_the_text() -> None:
    assert with_constants("x", {"A": 1, "B": "2.5f"}) == "#define A 1\n#define B 2.5f\nx"


def test_only_plain_single_precision_goes_to_the_kernels() -> None:
    plain = torch.zeros(6)
    assert suited(plain, plain[:1], device="cpu")
    assert not suited(plain)  # not on a GPU
    assert not suited(plain, plain.double(), device="cpu")
    assert not suited(plain, torch.zeros(12)[::2], device="cpu")
    assert not suited(plain, torch.zeros(6, device="meta"), device="cpu")


def test_a_constant_is_a_float_whatever_torch_makes_of_others() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert constant(0.8125, torch.device("cpu")).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
