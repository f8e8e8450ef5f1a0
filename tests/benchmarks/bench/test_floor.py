"""Operations and bytes against counts by hand and against torch's own counter."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vicinal.benchmarks.bench import floor
from vicinal.benchmarks.bench.floor import (
    Count,
    Rates,
    counting,
    measured_rates,
    optimizer_bytes,
    precision_of,
)
from vicinal.models.small import small_features

CPU = torch.device("cpu")
N, IN, OUT = 4, 8, 3


def test_a_linear_layer_by_hand() -> None:
    layer, x = nn.Linear(IN, OUT), torch.randn(N, IN)
    with counting() as count, torch.no_grad():
        layer(x)
    assert count.flops == 2 * N * IN * OUT
    assert count.bytes == 4 * (OUT + N * IN + IN * OUT + N * OUT)  # bias, input, weight, output


def test_its_backward_pass_by_hand() -> None:
    layer, x = nn.Linear(IN, OUT), torch.randn(N, IN, requires_grad=True)
    with counting() as count:
        layer(x).sum().backward()
    assert count.flops == 3 * 2 * N * IN * OUT  # output, gradient of the weight, gradient of the input


def test_a_convolution_by_hand() -> None:
    layer, x = nn.Conv2d(3, 5, 3, padding=1, bias=False), torch.randn(2, 3, 6, 7)
    with counting() as count, torch.no_grad():
        layer(x)
    assert count.flops == 2 * (2 * 5 * 6 * 7) * (3 * 3 * 3)
    assert count.bytes == 4 * (2 * 3 * 6 * 7 + 5 * 3 * 3 * 3 + 2 * 5 * 6 * 7)


def test_a_whole_step_agrees_with_torchs_counter() -> None:
    features, width = small_features(3)
    net = nn.Sequential(features, nn.Linear(width, 7))
    x = torch.randn(4, 3, 16, 16)
    with FlopCounterMode(display=False) as reference:
        net(x).logsumexp(-1).sum().backward()
    with counting() as count:
        net(x).logsumexp(-1).sum().backward()
    assert count.flops == reference.get_total_flops() > 0


def test_what_is_elementwise_is_no_arithmetic_of_the_floor() -> None:
    with counting() as count:
        torch.relu(torch.randn(100) * 2 + 1).sum()
    assert (count.flops, count.bytes) == (0, 0)


@pytest.mark.parametrize(
    ("make", "passes"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 3),  # reads parameter and gradient, writes the parameter
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 5),
        (lambda p: torch.optim.Adam(p, lr=0.1), 7),
    ],
)
def test_an_optimizer_step_moves_parameters_gradients_and_state(make: object, passes: int) -> None:
    used, unused = nn.Parameter(torch.ones(10, 10)), nn.Parameter(torch.ones(50))
    optimizer = make([used, unused])  # type: ignore[operator]
    used.grad = torch.ones(10, 10)
    with counting() as count:
        optimizer.step()
    assert count.bytes == optimizer_bytes(optimizer) == passes * 400


def test_nothing_is_counted_after_the_block() -> None:
    parameter = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(5)
    with counting() as count:
        pass
    optimizer.step()
    torch.ones(2, 2) @ torch.ones(2, 2)
    assert (count.flops, count.bytes) == (0, 0)


def test_the_precision_is_that_of_most_of_the_arithmetic() -> None:
    layer, small, x = nn.Linear(64, 64), torch.ones(2, 2), torch.randn(8, 64)
    with counting() as count, torch.no_grad():
        small @ small
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
    assert count.dtype == precision_of(count, CPU) == "bfloat16"


def test_the_floor_is_given_by_both_rates() -> None:
    rates = Rates({"float32": 1e9, "bfloat16": 4e9}, bytes=1e8)
    count = Count(flops=8_000_000, bytes=400_000)
    assert rates.floor(count, "float32") == pytest.approx((8e-3, 4e-3))
    assert rates.floor(count, "bfloat16") == pytest.approx((2e-3, 4e-3))


def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(floor.MATRIX, "cpu", 32)
    monkeypatch.setitem(floor.COPIED, "cpu", 1000)
    ticks = itertools.count()
    rates = measured_rates(CPU, lambda: next(ticks))  # every look at the clock is a second later
    assert rates.flops == {"float32": 2 * 32**3}
    assert rates.bytes == 2000
