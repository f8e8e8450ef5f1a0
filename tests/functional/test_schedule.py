import pytest
import torch

from vicinal.functional.schedule import one_cycle

WARM_UP, START, END = 0.3, 1 / 25, 1e-4


def test_one_cycle_has_the_shape_of_torch() -> None:
    steps = 100
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=1.0,
        total_steps=steps,
        pct_start=WARM_UP,
        div_factor=1 / START,
        final_div_factor=START / END,
    )
    peak, last = (
        WARM_UP * steps - 1,
        steps - 1,
    )  # torch counts phases in steps taken, so both ends sit one early
    for step in range(steps):
        rising = WARM_UP * step / peak
        falling = WARM_UP + (1 - WARM_UP) * (step - peak) / (last - peak)
        progress = rising if step <= peak else falling
        assert one_cycle(progress) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        if step < last:
            scheduler.step()


def test_one_cycle_starts_low_peaks_once_and_ends_lower() -> None:
    shares = [one_cycle(k / 1000) for k in range(1001)]
    assert shares[0] == pytest.approx(START)
    assert max(shares) == pytest.approx(1)
    assert shares[-1] == pytest.approx(END)
    top = shares.index(max(shares))
    assert top == pytest.approx(1000 * WARM_UP, abs=1)
    assert shares[: top + 1] == sorted(shares[: top + 1])
    assert shares[top:] == sorted(shares[top:], reverse=True)
