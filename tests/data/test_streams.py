from dataclasses import fields

import numpy as np
import pytest
import torch

from vicinal.data.streams import Stream, draw_marginal, label_shift_order, online_order
from vicinal.errors import ConfigError, DataError


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
