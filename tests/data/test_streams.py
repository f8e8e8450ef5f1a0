import inspect
import threading
from dataclasses import fields
from itertools import pairwise
from typing import get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import adapt
from vicinal.data import feeding
from vicinal.data.pixels import Chain, Pixels
from vicinal.data.streams import (
    JOINT,
    STREAMS,
    Stream,
    StreamSpec,
    class_sorted_order,
    continual_order,
    draw_marginal,
    label_shift_order,
    make_stream,
    online_order,
)
from vicinal.errors import ConfigError, DataError, UnknownNameError


def pictures(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.uint8).reshape(count, 1, 1, 1).expand(count, 3, 2, 2)


def test_batches_are_inputs_in_order_with_a_short_last_one() -> None:
    order = online_order(11, seed=3)
    stream = Stream("online", pictures(11), order, batch_size=4)
    batches = list(stream.batches("cpu"))
    assert [len(batch) for batch in batches] == [4, 4, 3]
    assert len(stream) == 3
    assert all(isinstance(batch, torch.Tensor) and batch.dtype == torch.float32 for batch in batches)
    arrived = (torch.cat(batches)[:, 0, 0, 0] * 255).round().long()
    assert torch.equal(arrived, order)


def test_batches_can_be_read_twice() -> None:
    stream = Stream("online", pictures(5), online_order(5, seed=0), batch_size=2)
    assert torch.equal(torch.cat(list(stream.batches("cpu"))), torch.cat(list(stream.batches("cpu"))))


def test_a_stream_has_nowhere_to_keep_labels() -> None:
    assert {field.name for field in fields(Stream)} == {"kind", "images", "order", "batch_size"}
    stream = Stream("label_shift", pictures(4), label_shift_order(torch.tensor([0, 1, 0, 1]), 1.0, 0), 2)
    assert not any("label" in name or "answer" in name or "target" in name for name in vars(stream))


@pytest.mark.parametrize(("count", "batch_size", "batches"), [(0, 4, 0), (4, 4, 1), (3, 4, 1), (5, 1, 5)])
def test_length_counts_batches(count: int, batch_size: int, batches: int) -> None:
    stream = Stream("online", pictures(count), online_order(count, seed=0), batch_size)
    assert len(stream) == len(list(stream.batches("cpu"))) == batches


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch size"):
        Stream("online", pictures(2), online_order(2, seed=0), 0)


def test_online_order_is_a_seeded_permutation() -> None:
    order = online_order(50, seed=1)
    assert sorted(order.tolist()) == list(range(50))
    assert order.dtype == torch.int64
    assert torch.equal(order, online_order(50, seed=1))
    assert not torch.equal(order, online_order(50, seed=2))


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 10.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_label_shift_follows_the_drawn_marginal_as_far_as_the_images_go(alpha: float, seed: int) -> None:
    rng = np.random.default_rng(99)
    available = np.array([40, 300, 120, 75, 10])
    labels = torch.from_numpy(rng.permutation(np.repeat(np.arange(5), available)))
    order = label_shift_order(labels, alpha, seed)
    found = labels[order].bincount(minlength=5).numpy()

    marginal = draw_marginal(5, alpha, np.random.default_rng(seed))
    total = next(m for m in range(10_000) if (np.floor(marginal * (m + 1)) > available).any())
    assert found.tolist() == np.floor(marginal * total).astype(int).tolist()
    assert (found == available).any()
    assert np.abs(found / found.sum() - marginal).max() < 5 / found.sum()
    assert len(set(order.tolist())) == len(order)


def test_label_shift_is_seeded_and_shuffled() -> None:
    labels = torch.arange(4).repeat_interleave(50)
    order = label_shift_order(labels, 5.0, seed=0)
    assert order.dtype == torch.int64
    assert torch.equal(order, label_shift_order(labels, 5.0, seed=0))
    assert not torch.equal(order, label_shift_order(labels, 5.0, seed=1))
    assert labels[order].tolist() != labels[order].sort().values.tolist()


def test_a_large_alpha_is_nearly_balanced_and_a_small_one_is_not() -> None:
    labels = torch.arange(5).repeat_interleave(100)
    even = labels[label_shift_order(labels, 1e6, seed=0)].bincount(minlength=5)
    skewed = labels[label_shift_order(labels, 0.05, seed=0)].bincount(minlength=5)
    assert even.min() >= 98
    assert skewed.max() > 0.5 * skewed.sum()


def test_label_shift_with_one_class_and_absent_classes() -> None:
    assert sorted(label_shift_order(torch.tensor([7, 7, 7]), 0.5, seed=0).tolist()) == [0, 1, 2]
    assert len(label_shift_order(torch.tensor([2, 9]), 0.01, seed=0)) >= 1


def test_drawn_marginals_have_the_moments_of_the_dirichlet() -> None:
    rng = np.random.default_rng(0)
    drawn = np.stack([draw_marginal(4, 0.5, rng) for _ in range(4000)])
    np.testing.assert_allclose(drawn.sum(axis=1), 1)
    np.testing.assert_allclose(drawn.mean(axis=0), 0.25, atol=0.02)
    # Var of one share is (1/K)(1 - 1/K) / (K alpha + 1).
    np.testing.assert_allclose(drawn.var(axis=0), 0.25 * 0.75 / 3, atol=0.005)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan")])
def test_alpha_must_be_positive(alpha: float) -> None:
    with pytest.raises(ConfigError, match="alpha"):
        label_shift_order(torch.tensor([0, 1]), alpha, seed=0)


def test_label_shift_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="at least one"):
        label_shift_order(torch.tensor([], dtype=torch.int64), 1.0, seed=0)


SIZES = (30, 12, 21)


def domains(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a stream of a kind is made of; a pixel tells the image, 100 k on for domain k."""
    count = len(SIZES) if kind in JOINT else 1
    images = [pictures(size) + 100 * k for k, size in enumerate(SIZES[:count])]
    generator = torch.Generator().manual_seed(0)
    return images, [torch.randint(4, (len(part),), generator=generator) for part in images]


def arrived(stream: Stream) -> list[int]:
    """Return the numbers of the images as an adapter sees them."""
    seen = torch.cat(list(stream.batches("cpu")))
    return (seen[:, 0, 0, 0] * 255).round().long().tolist()


def made(kind: str, seed: int = 0, batch_size: int = 4) -> Stream:
    return make_stream(StreamSpec(kind, batch_size), *domains(kind), seed)


def test_the_streams_are_the_agreed_ones() -> None:
    assert set(STREAMS) == {"online", "label_shift", "class_sorted", "continual", "mixed"}
    assert {kind for kind in STREAMS if StreamSpec(kind).joint} == {"continual", "mixed"}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_is_fixed_by_its_seed(kind: str) -> None:
    stream = made(kind, seed=5)
    assert stream.kind == kind
    assert stream.order.dtype == torch.int64
    assert torch.equal(stream.order, made(kind, seed=5).order)
    assert not torch.equal(stream.order, made(kind, seed=6).order)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_leaves_the_global_random_state_alone(kind: str) -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    first = made(kind)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == numpy_before
    torch.manual_seed(4)
    assert torch.equal(made(kind).order, first.order)


@pytest.mark.parametrize("kind", STREAMS)
def test_every_image_arrives_once(kind: str) -> None:
    images, labels = domains(kind)
    every = torch.cat(images)[:, 0, 0, 0].tolist()
    seen = arrived(made(kind))
    assert len(set(seen)) == len(seen)
    if kind == "label_shift":  # as many as the drawn marginal allows: the class that binds is used up
        found = labels[0][seen].bincount(minlength=4)
        assert set(seen) < set(every)
        assert (found == labels[0].bincount(minlength=4)).any()
    else:
        assert sorted(seen) == sorted(every)


def test_continual_is_one_domain_after_another_each_shuffled() -> None:
    seen, start = arrived(made("continual")), 0
    for k, size in enumerate(SIZES):
        own = seen[start : start + size]
        assert sorted(own) == list(range(100 * k, 100 * k + size))
        assert own != sorted(own)
        start += size
    # Domains of one size do not come in one order.
    one, other = continual_order([40, 40], seed=0).split(40)
    assert not torch.equal(one, other - 40)


def test_a_batch_of_a_continual_stream_may_span_two_domains() -> None:
    origins = [
        {int(value) // 100 for value in batch[:, 0, 0, 0] * 255 + 0.5}
        for batch in made("continual").batches("cpu")
    ]
    assert origins[7] == {0, 1}
    assert len(origins) == 16


def test_mixed_is_one_permutation_of_all_domains() -> None:
    seen = [number // 100 for number in arrived(made("mixed"))]
    assert [seen.count(k) for k in range(3)] == list(SIZES)
    # Each domain has about its share of either half: an unlikely draw is far outside.
    assert all(abs(seen[:31].count(k) - 31 * SIZES[k] / 63) < 8 for k in range(3))
    assert sum(a != b for a, b in pairwise(seen)) > 20


def test_class_sorted_comes_in_blocks_of_one_class() -> None:
    (_, (labels,)), stream = domains("class_sorted"), made("class_sorted")
    seen = labels[stream.order].tolist()
    assert sum(a != b for a, b in pairwise(seen)) == 3
    assert sorted(seen) == sorted(labels.tolist())


def test_the_blocks_and_what_is_in_them_are_in_random_order() -> None:
    labels = torch.tensor([7, 2, 9]).repeat_interleave(20)
    turns, inside = set(), set()
    for seed in range(30):
        blocks = class_sorted_order(labels, seed).split(20)
        turns.add(tuple(int(labels[block[0]]) for block in blocks))
        inside |= {tuple((block - block.min()).tolist()) for block in blocks}
    assert len(turns) == 6
    assert len(inside) == 90


@pytest.mark.parametrize("labels", [[], [3], [5, 5, 5]])
def test_class_sorted_of_few(labels: list[int]) -> None:
    order = class_sorted_order(torch.tensor(labels, dtype=torch.int64), 0)
    assert sorted(order.tolist()) == list(range(len(labels)))


def test_a_joint_stream_over_one_store_and_over_several() -> None:
    images, labels = domains("mixed")
    store = torch.cat(images)
    views = [Pixels(store, part) for part in torch.arange(len(store)).split(SIZES)]
    whole = make_stream(StreamSpec("mixed", 5), views, labels, 1)
    parts = make_stream(StreamSpec("mixed", 5), images, labels, 1)
    assert isinstance(whole.images, Pixels)
    assert isinstance(parts.images, Chain)
    assert arrived(whole) == arrived(parts)


@pytest.mark.parametrize("kind", ["online", "continual"])
def test_workers_change_nothing_and_end_with_the_stream(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = made(kind)
    plain, before = list(stream.batches("cpu")), threading.active_count()
    monkeypatch.setattr(feeding, "LARGE_BYTES", 0)
    for workers in (1, 3):
        monkeypatch.setattr(feeding, "WORKERS", workers)
        ahead = list(stream.batches("cpu"))
        assert [torch.equal(a, b) for a, b in zip(ahead, plain, strict=True)] == [True] * len(stream)
    for _ in stream.batches("cpu"):
        assert threading.active_count() > before
        break
    assert threading.active_count() == before


def test_unknown_streams_and_batches_of_none() -> None:
    with pytest.raises(UnknownNameError, match="'bursts': choose from class_sorted, continual, label_shift"):
        StreamSpec("bursts")
    with pytest.raises(ConfigError, match="batch size must be at least 1, not 0"):
        make_stream(StreamSpec(batch_size=0), *domains("online"), 0)


@pytest.mark.parametrize("kind", [kind for kind in STREAMS if kind not in JOINT])
def test_a_stream_of_one_domain_refuses_two(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}' is made of one domain: give one, not 3"):
        make_stream(StreamSpec(kind), *domains("mixed"), 0)


def test_labels_that_are_not_the_images_are_refused() -> None:
    images, labels = domains("mixed")
    for wrong in (labels[:2], [*labels[:2], labels[2][:-1]], []):
        with pytest.raises(DataError, match="one label for each image"):
            make_stream(StreamSpec("mixed"), images, wrong, 0)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_keeps_no_labels_and_yields_inputs_only(kind: str) -> None:
    images, labels = domains(kind)
    stream = make_stream(StreamSpec(kind), images, labels, 0)
    # Labels of its own storage: nothing a stream holds may be, or share memory with, one of them.
    held = [value for value in vars(stream).values() if isinstance(value, Tensor)]
    held += [part.positions for part in getattr(stream.images, "parts", (stream.images,))]
    own = {label.untyped_storage().data_ptr() for label in labels}
    assert not own & {value.untyped_storage().data_ptr() for value in held}
    assert set(vars(stream)) == {"kind", "images", "order", "batch_size"}
    for batch in stream.batches("cpu"):
        assert isinstance(batch, Tensor)
        assert batch.shape[1:] == (3, 2, 2)


@pytest.mark.parametrize("kind", ["online", "continual", "mixed"])
def test_labels_have_no_part_in_streams_that_do_not_sort_by_them(kind: str) -> None:
    images, labels = domains(kind)
    garbage = [(3 * label + 1) % 4 for label in labels]
    orders = [make_stream(StreamSpec(kind), images, given, 2).order for given in (labels, garbage)]
    assert torch.equal(*orders)


def test_no_adapter_takes_anything_that_could_hold_labels() -> None:
    assert list(inspect.signature(Adapter.forward).parameters) == ["self", "x"]
    hints = {**get_type_hints(Adapter.forward), **get_type_hints(adapt)}
    assert not any(word in str(hint) for hint in hints.values() for word in ("Roles", "Stream", "Labelled"))
