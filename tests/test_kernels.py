"""Every kernel compiles for real GPUs: that needs none of them, only the compiler that torch for CUDA has."""

import pytest
from torch.cuda import _utils

from vicinal.adapters import bookkeeping, reading
from vicinal.data import fused
from vicinal.kernels import with_constants

TEXTS = {
    "average": bookkeeping.source(),
    "renormalize": bookkeeping.source(),
    "read_stream": reading.source(),
    "measure": fused.source(whole_levels=True, channels=3),
    "augment": fused.source(whole_levels=False, channels=1),
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
