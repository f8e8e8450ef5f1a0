import math
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vicinal.functional.memory import (
    EVIDENCE,
    batch_memory,
    centres,
    empty_memory,
    evidence,
    over_average,
    relative_spread,
    remember,
    source_rows,
)
from vicinal.types import Head, StreamMemory

CLASSES, FEATURES = 4, 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head(seed: int = 100) -> Head:
    return Head(normal(CLASSES, FEATURES, seed=seed), normal(CLASSES, seed=seed + 1))


def batch(count: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    return normal(count, FEATURES, seed=seed), normal(count, CLASSES, seed=seed + 50).mul(2).softmax(-1)


def stream(sizes: tuple[int, ...] = (6, 6, 3), decay: float = 0.9) -> StreamMemory:
    memory = empty_memory(head())
    for seed, size in enumerate(sizes):
        memory = remember(memory, batch_memory(*batch(size, seed)), decay)
    return memory


def read(memory: StreamMemory, source: Head) -> Tensor:
    return evidence(memory, centres(memory), source_rows(source))


def evidence_by_loop(memory: StreamMemory, source: Head) -> Tensor:
    """The numbers written out class by class, in plain Python."""
    total = [float(memory.sums[:, k].sum() / memory.counts.sum()) for k in range(FEATURES)]
    means = [
        [float(memory.sums[c, k] / memory.counts[c]) - total[k] for k in range(FEATURES)]
        for c in range(CLASSES)
    ]
    centre = [sum(float(source.weight[c, k]) for c in range(CLASSES)) / CLASSES for k in range(FEATURES)]
    rows = [[float(source.weight[c, k]) - centre[k] for k in range(FEATURES)] for c in range(CLASSES)]
    mean_norms, row_norms = ([math.hypot(*vector) for vector in vectors] for vectors in (means, rows))
    table = []
    for c in range(CLASSES):
        dot = sum(a * b for a, b in zip(means[c], rows[c], strict=True))
        table.append(
            [
                math.log(float(memory.counts[c]) + 1e-6),
                dot / (mean_norms[c] * row_norms[c]),
                float(memory.counts[c] / memory.mass[c]),
                mean_norms[c] * CLASSES / sum(mean_norms),
                row_norms[c] * CLASSES / sum(row_norms),
                math.log(CLASSES * float(memory.marginal[c]) + 1e-3),
                math.log(spread(memory, [c]) / spread(memory, range(CLASSES)) + 1e-2),
                math.log(CLASSES * float(memory.counts[c] / memory.counts.sum()) + 1e-3),
            ]
        )
    averages = [sum(row[k] for row in table) / CLASSES for k in range(len(table[0]))]
    return torch.tensor([row + averages for row in table], dtype=torch.float64)


def spread(memory: StreamMemory, classes: Iterable[int]) -> float:
    """The variance of what was labelled as some classes, summed over the features."""
    chosen = list(classes)
    count = float(memory.counts[chosen].sum())
    middle = [float(memory.sums[chosen, k].sum()) / count for k in range(FEATURES)]
    return float(memory.squares[chosen].sum()) / count - sum(value**2 for value in middle)


def test_one_batch_is_remembered_sample_by_sample() -> None:
    z, y = batch()
    new = batch_memory(z, y)
    for c in range(CLASSES):
        weights = [float(p) ** 2 for p in y[:, c]]
        assert float(new.counts[c]) == pytest.approx(sum(weights))
        assert float(new.mass[c]) == pytest.approx(sum(float(p) for p in y[:, c]))
        assert float(new.marginal[c]) == pytest.approx(float(y[:, c].sum()) / len(y))
        expected = sum(w * row for w, row in zip(weights, z, strict=True))
        torch.testing.assert_close(new.sums[c], expected)
        squares = sum(w * float(row @ row) for w, row in zip(weights, z, strict=True))
        assert float(new.squares[c]) == pytest.approx(squares)


def test_the_memory_is_the_decayed_sum_of_its_batches() -> None:
    memory = stream((6, 6, 3), decay=0.8)
    parts = [batch_memory(*batch(size, seed)) for seed, size in enumerate((6, 6, 3))]
    for name in ("sums", "counts", "mass", "squares"):
        expected = sum(0.8 ** (2 - age) * getattr(part, name) for age, part in enumerate(parts))
        torch.testing.assert_close(getattr(memory, name), expected)
    uniform = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)
    shares = sum(0.2 * 0.8 ** (2 - age) * part.marginal for age, part in enumerate(parts))
    torch.testing.assert_close(memory.marginal, 0.8**3 * uniform + shares)


def test_no_decay_remembers_all_and_full_decay_nothing() -> None:
    old, new = stream(), batch_memory(*batch(seed=9))
    torch.testing.assert_close(remember(old, new, 1.0).counts, old.counts + new.counts)
    torch.testing.assert_close(remember(old, new, 0.0), new)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), max_size=6),
    decay=st.floats(0, 1),
    seed=st.integers(0, 1000),
    sharpness=st.floats(0, 100),
)
def test_the_marginal_stays_a_distribution_and_confidence_a_share(
    sizes: list[int], decay: float, seed: int, sharpness: float
) -> None:
    memory = empty_memory(head())
    for step, size in enumerate(sizes):
        y = (sharpness * normal(size, CLASSES, seed=seed + step)).softmax(-1)
        memory = remember(memory, batch_memory(normal(size, FEATURES, seed=seed), y), decay)
    assert float(memory.marginal.sum()) == pytest.approx(1)
    numbers = read(memory, head())
    assert bool(numbers.isfinite().all())
    confidence = numbers[:, EVIDENCE.index("confidence")]
    assert bool(((confidence >= 0) & (confidence <= 1 + 1e-9)).all())
    cosine = numbers[:, EVIDENCE.index("cosine")]
    assert bool((cosine.abs() <= 1 + 1e-9).all())


def test_centred_means_are_class_means_less_the_mean_of_the_stream() -> None:
    z, y = batch(9)
    weights = y.square()
    at = centres(batch_memory(z, y))
    centred, total = at.centred, at.total
    expected_total = sum(float(weights[i].sum()) * z[i] for i in range(9)) / float(weights.sum())
    torch.testing.assert_close(total, expected_total.unsqueeze(0))
    for c in range(CLASSES):
        mean = sum(float(weights[i, c]) * z[i] for i in range(9)) / float(weights[:, c].sum())
        torch.testing.assert_close(centred[c], mean - expected_total)


def test_a_class_nobody_was_labelled_as_has_centred_mean_zero() -> None:
    z = normal(5, FEATURES)
    one_class = torch.eye(CLASSES, dtype=torch.float64)[torch.zeros(5, dtype=torch.long)]
    at = centres(batch_memory(z, one_class))
    centred, total = at.centred, at.total
    torch.testing.assert_close(total[0], z.mean(0))
    torch.testing.assert_close(centred, torch.zeros_like(centred))
    two = torch.eye(CLASSES, dtype=torch.float64)[torch.tensor([0, 0, 2, 2, 2])]
    centred = centres(batch_memory(z, two)).centred
    assert centred[[1, 3]].abs().sum() == 0
    torch.testing.assert_close(centred[0], z[:2].mean(0) - z.mean(0))


def test_evidence_agrees_with_plain_python() -> None:
    memory = stream()
    numbers = read(memory, head())
    assert numbers.shape == (CLASSES, len(EVIDENCE))
    torch.testing.assert_close(numbers, evidence_by_loop(memory, head()))


def test_a_class_that_swallows_others_is_wide() -> None:
    near, far = normal(20, FEATURES) * 0.1, normal(20, FEATURES, seed=1) * 0.1 + 5
    z = torch.cat([near, far])
    right = torch.eye(CLASSES, dtype=torch.float64)[torch.tensor([0] * 20 + [1] * 20)]
    swallowed = torch.eye(CLASSES, dtype=torch.float64)[torch.tensor([0] * 30 + [1] * 10)]
    tight, wide = (
        relative_spread(new, centres(new)) for new in (batch_memory(z, y) for y in (right, swallowed))
    )
    assert tight[0] < 0.01
    assert wide[0] > 0.5
    assert tight[2:].tolist() == wide[2:].tolist() == [1, 1]


def test_what_is_left_of_one_image_is_rounding_and_no_spread() -> None:
    z = (5 + 0.1 * normal(1, FEATURES)).float().expand(20, -1)
    labels = torch.randint(CLASSES, (20,), generator=torch.Generator().manual_seed(0))
    new = batch_memory(z, torch.eye(CLASSES)[labels])
    spread = relative_spread(new, centres(new))
    assert len(labels.unique()) == CLASSES
    assert float(spread.max()) < 1


def test_a_class_that_is_hardly_there_has_the_spread_of_all() -> None:
    y = torch.zeros(6, CLASSES, dtype=torch.float64)
    y[:, 0], y[0, 1] = 1, 1e-2  # a count of 1e-4, at one place: none of a spread of its own
    new = batch_memory(normal(6, FEATURES), y)
    spread = relative_spread(new, centres(new))
    assert float(new.counts[1]) == pytest.approx(1e-4)
    assert float(spread[1]) == 1
    assert float(spread[0]) != 1


@settings(max_examples=40, deadline=None)
@given(
    feature_scale=st.floats(1e-3, 1e3),
    row_scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 1000),
)
def test_evidence_is_free_of_the_scale_of_features_and_rows(
    feature_scale: float, row_scale: float, seed: int
) -> None:
    z, y = batch(8, seed)
    source = head(seed)
    larger = Head(row_scale * source.weight, source.bias)
    torch.testing.assert_close(
        read(batch_memory(feature_scale * z, y), larger),
        read(batch_memory(z, y), source),
        rtol=1e-6,
        atol=1e-6,
    )


def test_evidence_sees_no_shift_of_features_or_rows() -> None:
    z, y = batch(8)
    moved = Head(head().weight + 5, head().bias)
    torch.testing.assert_close(read(batch_memory(z + 3, y), moved), read(batch_memory(z, y), head()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_empty_memory_gives_finite_evidence(dtype: torch.dtype) -> None:
    source = Head(*(part.to(dtype) for part in head()))
    numbers = read(empty_memory(source), source)
    assert numbers.dtype == dtype
    assert bool(numbers.isfinite().all())
    column = {name: numbers[:, k].double() for k, name in enumerate(EVIDENCE)}
    assert column["log_count"].tolist() == [-5] * CLASSES
    for name in ("cosine", "confidence", "mean_norm"):
        assert column[name].tolist() == [0] * CLASSES
    assert float(column["log_marginal"].abs().max()) < 0.01  # uniform: the log of one


def test_an_empty_memory_passes_finite_gradients() -> None:
    leaves = [part.requires_grad_() for part in empty_memory(head())]
    rows = head().weight.requires_grad_()
    total = read(StreamMemory(*leaves), Head(rows, head().bias)).sum()
    for grad in torch.autograd.grad(total, [*leaves, rows]):
        assert bool(grad.isfinite().all())


def test_rows_and_features_that_are_all_zero_give_finite_evidence() -> None:
    _, y = batch()
    nothing = Head(torch.zeros(CLASSES, FEATURES).double(), torch.zeros(CLASSES).double())
    assert bool(read(batch_memory(torch.zeros(6, FEATURES).double(), y), nothing).isfinite().all())


def test_many_steps_at_once_are_the_steps_one_by_one() -> None:
    memories = [stream((6,)), stream((6, 3)), empty_memory(head())]
    heads = [head(seed) for seed in (100, 110, 120)]
    stacked = StreamMemory(*(torch.stack(parts) for parts in zip(*memories, strict=True)))
    stacked_heads = Head(*(torch.stack(parts) for parts in zip(*heads, strict=True)))
    one_by_one = [read(memory, source) for memory, source in zip(memories, heads, strict=True)]
    torch.testing.assert_close(read(stacked, stacked_heads), torch.stack(one_by_one))
    shared = torch.stack([read(memory, heads[0]) for memory in memories])
    torch.testing.assert_close(read(stacked, heads[0]), shared)


def test_norms_over_their_average_average_to_one() -> None:
    rows = normal(5, 7)
    expected = [math.hypot(*row) for row in rows.tolist()]
    torch.testing.assert_close(
        over_average(rows.norm(dim=-1)), torch.tensor(expected).double() * 5 / sum(expected)
    )
    assert float(over_average(rows.norm(dim=-1)).mean()) == pytest.approx(1)


def test_half_precision_stays_close() -> None:
    z, y = (part.bfloat16() for part in batch(16))
    source = Head(*(part.bfloat16() for part in head()))
    exact = read(batch_memory(z.double(), y.double()), Head(*(part.double() for part in source)))
    torch.testing.assert_close(read(batch_memory(z, y), source).double(), exact, rtol=0.05, atol=0.05)
