from collections import Counter

import pytest
import torch

from vicinal.data.domains import LabelledImages
from vicinal.data.episodes import draw_batch, split_meta_target
from vicinal.data.transforms import Augment

STEP = 10  # images of domain k hold the values 10 k to 10 k + 9, so that a pixel tells where it came from


def parts(count: int, size: int = STEP) -> list[LabelledImages]:
    made = []
    for index in range(count):
        values = torch.arange(size) + STEP * index
        images = values.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()
        made.append(LabelledImages(images, values))
    return made


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("domains", "count"), [(3, 70), (3, 2), (1, 5), (4, 8)])
def test_a_batch_is_spread_evenly_over_the_domains(domains: int, count: int) -> None:
    x, y = draw_batch(parts(domains), count, generator(), "cpu")
    shares = Counter((y // STEP).tolist())
    assert len(x) == len(y) == count
    assert set(shares) <= set(range(domains))
    sizes = [shares[index] for index in range(domains)]
    assert max(sizes) - min(sizes) <= 1


def test_images_and_labels_stay_together_and_come_as_floats() -> None:
    x, y = draw_batch(parts(3), 30, generator(), "cpu")
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    expected = (y.float() / 255).view(-1, 1, 1, 1).expand_as(x)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


def test_draws_are_with_replacement_and_reach_every_image() -> None:
    _, y = draw_batch(parts(1, size=4), 200, generator(), "cpu")
    assert set(y.tolist()) == {0, 1, 2, 3}


def test_a_seed_fixes_the_batch_and_the_generator_moves_on() -> None:
    one, other = generator(3), generator(3)
    first, same = draw_batch(parts(2), 20, one, "cpu"), draw_batch(parts(2), 20, other, "cpu")
    assert torch.equal(first[0], same[0])
    assert torch.equal(first[1], same[1])
    assert not torch.equal(draw_batch(parts(2), 20, one, "cpu")[1], first[1])


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    draw_batch(parts(2), 20, generator(), "cpu", Augment())
    split_meta_target(3, generator())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_augmentation_runs_on_the_drawn_batch_with_the_same_generator() -> None:
    gradient = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4) * 10
    part = LabelledImages(gradient.expand(5, 1, 4, 4).contiguous(), torch.arange(5))
    augment = Augment(min_scale=0.3)
    one, other = generator(1), generator(1)
    seen, labels = draw_batch([part], 8, one, "cpu", augment)
    plain, expected = draw_batch([part], 8, other, "cpu")
    assert torch.equal(labels, expected)
    assert torch.equal(seen, augment(plain, other))
    assert not torch.equal(seen, plain)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_meta_target_is_any_domain_and_the_rest_are_meta_sources(count: int) -> None:
    shared = generator()
    picked: Counter[int] = Counter()
    for _ in range(100 * count):
        target, rest = split_meta_target(count, shared)
        assert sorted([target, *rest]) == list(range(count))
        assert target not in rest
        picked[target] += 1
    # Each domain is expected 100 times; five standard deviations are below 50.
    assert all(50 < picked[index] < 150 for index in range(count))
