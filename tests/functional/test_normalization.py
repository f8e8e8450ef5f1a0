import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vicinal.functional.normalization import (
    MAX_STRETCH,
    Moments,
    blend_weight,
    mix,
    moments_of,
    stream_weight,
    transport,
    weighted_moments,
)

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def images(count: int, seed: int, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(3, generator=generator, dtype=torch.float64) + 0.5
    return shift + scale * torch.randn(count, 3, generator=generator, dtype=torch.float64)


def moments(data: Tensor) -> Moments:
    return Moments(data.mean(0), data.var(0, unbiased=False))


def assert_moments_of(found: Moments, data: Tensor) -> None:
    torch.testing.assert_close(found.mean, data.mean(0))
    torch.testing.assert_close(found.variance, data.var(0, unbiased=False))


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 5), (8, 3, 4, 5), (1, 3, 4, 5)])
def test_moments_are_taken_over_samples_and_places(shape: tuple[int, ...]) -> None:
    x = 2 + torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    found = moments_of(x.requires_grad_())
    for c in range(3):
        values = x[:, c].detach().flatten().tolist()
        mean = statistics.fmean(values)
        assert float(found.mean[c]) == pytest.approx(mean, rel=1e-5)
        assert float(found.variance[c]) == pytest.approx(statistics.pvariance(values, mean), rel=1e-4)
    assert not found.mean.requires_grad
    assert not found.variance.requires_grad


def test_moments_are_those_batch_norm_normalises_by() -> None:
    x = 3 + 2 * torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    layer = nn.BatchNorm2d(3, affine=False, eps=1e-3)
    mean, variance = (part.view(1, 3, 1, 1) for part in moments_of(x))
    torch.testing.assert_close((x - mean) / (variance + 1e-3).sqrt(), layer(x))


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 4, 5)])
def test_an_image_of_weight_three_is_three_images(shape: tuple[int, ...]) -> None:
    x = 2 + torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    times = torch.tensor([3, 1, 0, 2])
    found = weighted_moments(x.requires_grad_(), times / 7.0)
    torch.testing.assert_close(found, moments_of(x.detach().repeat_interleave(times, 0)))
    assert not found.mean.requires_grad
    torch.testing.assert_close(weighted_moments(x, torch.full((4,), 0.3)), moments_of(x))


def test_moments_of_one_image_without_places_have_no_spread() -> None:
    found = moments_of(torch.tensor([[1.0, 2.0]]))
    assert found.mean.tolist() == [1, 2]
    assert found.variance.tolist() == [0, 0]


def test_mixing_by_share_gives_the_moments_of_the_data_together() -> None:
    old, new = images(40, seed=0), images(10, seed=1, shift=3.0)
    mixed = mix(moments(old), moments(new), 10 / 50)
    assert_moments_of(mixed, torch.cat([old, new]))
    # Mixing variances instead would miss the spread between the two.
    by_variance = 0.8 * old.var(0, unbiased=False) + 0.2 * new.var(0, unbiased=False)
    assert bool((mixed.variance > by_variance + 1).all())


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_weight_at_the_end_keeps_one_side(weight: float) -> None:
    old, new = moments(images(9, seed=0)), moments(images(9, seed=1))
    kept = mix(old, new, weight)
    torch.testing.assert_close(kept, (old, new)[int(weight)])


def test_images_one_at_a_time_still_make_a_variance() -> None:
    source, stream = images(20, seed=0), images(200, seed=1, shift=1.0)
    running = moments(source)
    for seen, image in enumerate(stream):
        single = Moments(image, torch.zeros(3, dtype=torch.float64))
        running = mix(running, single, stream_weight(1, torch.tensor(seen), 20, floor=0.0))
    assert_moments_of(running, torch.cat([source, stream]))


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, source_images=st.integers(1, 40), seed=st.integers(0, 1000))
def test_without_a_floor_the_stream_average_counts_every_image_the_same(
    sizes: list[int], source_images: int, seed: int
) -> None:
    source = images(source_images, seed)
    arrived = [source]
    running = moments(source)
    for step, size in enumerate(sizes):
        batch = images(size, seed + step + 1, shift=0.5 * step)
        seen = sum(sizes[:step])
        running = mix(
            running, moments(batch), stream_weight(size, torch.tensor(seen), source_images, floor=0.0)
        )
        arrived.append(batch)
    assert_moments_of(running, torch.cat(arrived))


def test_at_the_reference_batch_size_the_weight_is_the_plain_mean_and_then_the_floor() -> None:
    weights = [float(stream_weight(20, torch.tensor(20 * (t - 1)), 20, 0.05)) for t in range(1, 101)]
    assert weights == pytest.approx([max(1 / (t + 1), 0.05) for t in range(1, 101)], rel=1e-12)
    assert weights[0] == 0.5  # the source statistics count as one batch
    assert weights[18] == pytest.approx(0.05)
    assert weights[99] == pytest.approx(0.05)


def test_the_floor_is_of_as_many_images_as_the_source_counts_for() -> None:
    assert float(stream_weight(7, torch.tensor(1e6), 7, 0.1)) == pytest.approx(0.1)


@pytest.mark.parametrize("batch", [1, 5, 10])
def test_the_floor_forgets_as_fast_in_small_batches_as_in_large_ones(batch: int) -> None:
    kept = 1.0
    for _ in range(20 // batch):
        kept *= 1 - float(stream_weight(batch, torch.tensor(100_000), 20, 0.05))
    assert kept == pytest.approx(0.95, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 500),
    seen=st.integers(0, 10**6),
    source_images=st.integers(1, 500),
    floor=st.floats(0, 0.5),
)
def test_weights_stay_between_zero_and_one_and_fall_as_the_stream_goes_on(
    size: int, seen: int, source_images: int, floor: float
) -> None:
    now, later = torch.tensor(seen), torch.tensor(seen + size)
    weight = stream_weight(size, now, source_images, floor)
    assert 0 < weight <= 1  # one only by rounding, when the batch dwarfs the source
    assert stream_weight(size, later, source_images, floor) <= weight
    assert stream_weight(size + 1, now, source_images, floor) >= weight


def test_blend_weight_is_the_share_of_the_batch() -> None:
    assert blend_weight(20, 20) == 0.5
    assert blend_weight(16, 48) == 0.25
    batch, source = images(16, seed=0), images(48, seed=1, shift=1.0)
    assert_moments_of(mix(moments(source), moments(batch), blend_weight(16, 48)), torch.cat([source, batch]))


def test_a_mean_far_from_zero_costs_no_precision() -> None:
    old, new = (images(200, seed=seed, shift=1e3).float() for seed in (0, 1))
    found = mix(moments_of(old), moments_of(new), 0.5)
    together = torch.cat([old, new]).double().var(0, unbiased=False)
    torch.testing.assert_close(found.variance.double(), together, rtol=1e-4, atol=0)


@settings(max_examples=50, deadline=None)
@given(
    stretch=st.floats(1 / MAX_STRETCH, MAX_STRETCH),
    shift=st.floats(-5, 5),
    seed=st.integers(0, 1000),
)
def test_an_affine_update_carries_the_statistics_of_the_stream_along(
    stretch: float, shift: float, seed: int
) -> None:
    stream, batch = images(60, seed), images(9, seed + 1, shift=1.0)
    carried = transport(moments(stream), moments(batch), moments(stretch * batch + shift))
    expected = moments(stretch * stream + shift)
    torch.testing.assert_close(carried, expected, rtol=1e-6, atol=1e-6)


def test_an_update_that_moves_nothing_leaves_the_statistics_alone() -> None:
    stream, batch = moments(images(60, seed=0)), moments(images(9, seed=1))
    torch.testing.assert_close(transport(stream, batch, batch), stream)


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_one_update_stretches_a_channel_only_so_far(scale: float) -> None:
    stream, batch = moments(images(60, seed=0)), moments(images(9, seed=1))
    carried = transport(stream, batch, Moments(batch.mean, scale**2 * batch.variance))
    allowed = MAX_STRETCH if scale > 1 else 1 / MAX_STRETCH
    torch.testing.assert_close(carried.variance, allowed**2 * stream.variance)
    torch.testing.assert_close(carried.mean - batch.mean, allowed * (stream.mean - batch.mean))


def test_a_channel_that_is_dead_before_or_after_an_update_stays_finite() -> None:
    alive, dead = moments(images(9, seed=0)), Moments(torch.zeros(3).double(), torch.zeros(3).double())
    for before, after in ((alive, dead), (dead, alive), (dead, dead)):
        carried = transport(alive, before, after)
        assert bool(torch.cat(carried).isfinite().all())
        assert bool((carried.variance >= 0).all())


def test_half_precision_inputs_are_measured_in_single() -> None:
    x = images(400, seed=0, shift=2.0).bfloat16()
    found = moments_of(x)
    assert found.variance.dtype == torch.float32
    torch.testing.assert_close(found.mean.double(), x.double().mean(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.variance.double(), x.double().var(0, unbiased=False), rtol=1e-4, atol=0)
