"""Training episodes: balanced, seeded, the same whatever is made ahead."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vicinal.data import feeding
from vicinal.data.augment import Augment
from vicinal.data.domains import LabelledImages, SourceDomain
from vicinal.data.episodes import (
    Batch,
    Draw,
    Drawing,
    Episode,
    Episodes,
    from_all,
    from_one,
    split_meta,
)
from vicinal.data.pixels import Pixels

STEP = 10  # images of domain k hold the values 10 k to 10 k + 9, so that a pixel tells where it came from
CPU = torch.device("cpu")


def sources(count: int, size: int = STEP) -> list[SourceDomain]:
    made = []
    for index in range(count):
        values = torch.arange(size) + STEP * index
        images = values.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()
        part = LabelledImages(images, values)
        made.append(SourceDomain(f"d{index}", part, part))
    return made


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def state(seed: int = 0) -> Tensor:
    return generator(seed).get_state()


def over_all(size: int) -> Drawing:
    """Return a drawing of one batch of that size over all domains."""
    return lambda count, batch_size, rng: (Draw(range(count), size),)


def episodes(
    drawing: Drawing = from_all,
    domains: Sequence[SourceDomain] | None = None,
    batch_size: int = 6,
    augment: Augment | None = None,
) -> Episodes:
    return Episodes(sources(3) if domains is None else domains, drawing, batch_size, augment, CPU)


def first_batch(made: Episodes, seed: int = 0) -> Batch:
    (episode,) = made.starting_at(state(seed), 1)
    (batch,) = episode.batches
    return batch


def same(one: Sequence[Episode], other: Sequence[Episode]) -> bool:
    tensors, others = (
        [t for episode in some for t in (episode.state, *(t for batch in episode.batches for t in batch))]
        for some in (one, other)
    )
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))


@pytest.mark.parametrize(("domains", "count"), [(3, 70), (3, 2), (1, 5), (4, 8)])
def test_a_batch_is_spread_evenly_over_the_domains(domains: int, count: int) -> None:
    x, y = first_batch(episodes(over_all(count), sources(domains)))
    shares = Counter((y // STEP).tolist())
    assert len(x) == len(y) == count
    assert set(shares) <= set(range(domains))
    sizes = [shares[index] for index in range(domains)]
    assert max(sizes) - min(sizes) <= 1


def test_domains_of_different_sizes_count_the_same() -> None:
    small, large = sources(1, size=2)[0], sources(2)[1]
    _, y = first_batch(episodes(over_all(40), [small, large]))
    assert Counter((y // STEP).tolist()) == {0: 20, 1: 20}


def test_images_and_labels_stay_together_and_come_as_floats() -> None:
    x, y = first_batch(episodes(over_all(30)))
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    expected = (y.float() / 255).view(-1, 1, 1, 1).expand_as(x)
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


def test_images_are_drawn_as_the_generator_says() -> None:
    _, y = first_batch(episodes(over_all(8)), seed=5)
    rng = generator(5)
    expected = [torch.randint(STEP, (share,), generator=rng) + STEP * k for k, share in enumerate((3, 3, 2))]
    assert torch.equal(y, torch.cat(expected))


def test_draws_are_with_replacement_and_reach_every_image() -> None:
    _, y = first_batch(episodes(over_all(200), sources(1, size=4)))
    assert set(y.tolist()) == {0, 1, 2, 3}


def test_a_view_of_a_larger_store_gives_what_its_copy_gives() -> None:
    positions = torch.tensor([7, 3, 3, 1])
    part = sources(1)[0].train
    view = LabelledImages(Pixels(part.images, positions), part.labels[positions])
    copy = LabelledImages(part.images[positions], part.labels[positions])
    lazy, plain = (
        list(episodes(domains=[SourceDomain("d", images, images)]).starting_at(state(), 3))
        for images in (view, copy)
    )
    assert same(lazy, plain)


@pytest.mark.parametrize("drawing", [from_all, split_meta, from_one])
def test_a_state_fixes_all_episodes_and_another_gives_others(drawing: Drawing) -> None:
    made = episodes(drawing, augment=Augment())
    first, again = (list(made.starting_at(state(3), 5)) for _ in range(2))
    assert same(first, again)
    assert not same(first, list(made.starting_at(state(4), 5)))
    assert not torch.equal(first[0].batches[0].y, first[1].batches[0].y)


@pytest.mark.parametrize("drawing", [from_all, split_meta, from_one])
def test_episodes_go_on_from_the_state_after_any_of_them(drawing: Drawing) -> None:
    made = episodes(drawing, augment=Augment())
    whole = list(made.starting_at(state(1), 7))
    assert same(list(made.starting_at(whole[3].state, 3)), whole[4:])


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("drawing", [from_all, split_meta])
def test_workers_change_nothing_but_the_thread(
    drawing: Drawing, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, threads = episodes(drawing, augment=Augment(brightness=0.3)), set()
    plain = list(made.starting_at(state(2), 12))
    monkeypatch.setattr(feeding, "LARGE_BYTES", 0)
    monkeypatch.setattr(feeding, "WORKERS", workers)
    gather = Episodes._take

    def watched(self: Episodes, chosen: object) -> object:
        threads.add(threading.get_ident())
        return gather(self, chosen)  # type: ignore[arg-type]

    monkeypatch.setattr(Episodes, "_take", watched)
    ahead = list(made.starting_at(state(2), 12))
    assert threads
    assert threading.get_ident() not in threads
    assert same(ahead, plain)
    # The state that comes with an episode is the one after it, not after those drawn ahead.
    assert same(list(made.starting_at(ahead[4].state, 7)), plain[5:])


def test_episodes_that_are_not_asked_for_leave_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "LARGE_BYTES", 0)
    before = threading.active_count()
    for index, _ in enumerate(episodes().starting_at(state(), 1000)):
        assert threading.active_count() > before
        if index == 2:
            break
    assert threading.active_count() == before


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    list(episodes(split_meta, augment=Augment()).starting_at(state(), 2))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_augmentation_runs_on_the_drawn_batch_with_the_same_generator() -> None:
    gradient = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4) * 10
    part = LabelledImages(gradient.expand(5, 1, 4, 4).contiguous(), torch.arange(5))
    augment = Augment(min_scale=0.3)
    plain = episodes(over_all(8), [SourceDomain("d", part, part)])
    unchanged, expected = first_batch(plain, seed=1)
    seen, labels = first_batch(replace(plain, augment=augment), seed=1)
    rng = generator(1)
    drawn = torch.randint(5, (8,), generator=rng)  # the images come first
    assert torch.equal(labels, expected)
    assert torch.equal(seen, augment(part.images[drawn], rng))
    assert not torch.equal(seen, unchanged)


def test_erm_takes_both_batches_of_a_meta_iteration_at_once() -> None:
    assert from_all(3, 35, generator()) == (Draw(range(3), 70),)


def test_one_domain_at_a_time_is_any_domain() -> None:
    rng, picked = generator(), Counter[int]()
    for _ in range(300):
        ((domains, size),) = from_one(3, 7, rng)
        assert size == 7
        (domain,) = domains
        picked[domain] += 1
    assert all(50 < picked[index] < 150 for index in range(3))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_meta_target_is_any_domain_and_the_rest_are_meta_sources(count: int) -> None:
    shared = generator()
    picked: Counter[int] = Counter()
    for _ in range(100 * count):
        (rest, size), (targets, other) = split_meta(count, 9, shared)
        assert size == other == 9
        (target,) = targets
        assert sorted([target, *rest]) == list(range(count))
        assert target not in rest
        picked[target] += 1
    # Each domain is expected 100 times; five standard deviations are below 50.
    assert all(50 < picked[index] < 150 for index in range(count))


def test_a_lone_domain_plays_both_parts() -> None:
    assert split_meta(1, 4, generator()) == (Draw([0], 4), Draw([0], 4))


def test_the_batches_of_a_meta_episode_share_no_domain() -> None:
    for episode in episodes(split_meta).starting_at(state(), 20):
        source, target = ({int(label) // STEP for label in batch.y} for batch in episode.batches)
        assert len(target) == 1
        assert len(source) == 2
        assert not source & target
