"""Votes of nearest neighbors, held against loops over samples in double precision."""

import math

import pytest
import torch
from torch import Tensor

from vicinal.functional.neighbors import neighbor_votes
from vicinal.types import Crowd


def made(batch: int, crowd: int, classes: int = 3, features: int = 5, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(batch + crowd, features, generator=generator, dtype=torch.double)
    y = torch.randn(batch + crowd, classes, generator=generator, dtype=torch.double).softmax(-1)
    return z[:batch], y[:batch], z[batch:], y[batch:]


def crowd_of(z: Tensor, y: Tensor, known: list[bool] | None = None) -> Crowd:
    there = torch.ones(len(z), dtype=torch.bool) if known is None else torch.tensor(known)
    return Crowd(z / z.norm(dim=-1, keepdim=True), y, there)


def votes_by_hand(
    z: Tensor, y: Tensor, crowd_z: Tensor, crowd_y: Tensor, k: int, tau: float
) -> list[list[float]]:
    everyone, labels, classes = [*z, *crowd_z], [*y, *crowd_y], y.shape[-1]
    found = []
    for i in range(len(z)):
        others = [j for j in range(len(everyone)) if j != i]
        cosine = {j: float(z[i] @ everyone[j] / (z[i].norm() * everyone[j].norm())) for j in others}
        near = sorted(others, key=lambda j: -cosine[j])[: min(k, math.ceil(len(others) / classes))]
        weights = {j: math.exp(cosine[j] / tau) for j in near}
        total = sum(weights.values())
        found.append([sum(weights[j] * float(labels[j][c]) for j in near) / total for c in range(classes)])
    return found


@pytest.mark.parametrize(("batch", "crowd", "k"), [(4, 30, 5), (6, 0, 10), (1, 9, 2), (3, 2, 1), (5, 7, 50)])
def test_votes_are_those_of_a_loop(batch: int, crowd: int, k: int) -> None:
    z, y, crowd_z, crowd_y = made(batch, crowd)
    found = neighbor_votes(z, y, crowd_of(crowd_z, crowd_y), k, 0.1)
    expected = torch.tensor(votes_by_hand(z, y, crowd_z, crowd_y, k, 0.1), dtype=torch.double)
    torch.testing.assert_close(found, expected)


def test_room_for_samples_does_not_vote() -> None:
    z, y, crowd_z, crowd_y = made(3, 8)
    known = [True, False, True, True, False, False, True, False]
    kept = [index for index, there in enumerate(known) if there]
    found = neighbor_votes(z, y, crowd_of(crowd_z, crowd_y, known), 4, 0.1)
    torch.testing.assert_close(found, neighbor_votes(z, y, crowd_of(crowd_z[kept], crowd_y[kept]), 4, 0.1))


def test_a_sample_without_neighbors_keeps_its_label() -> None:
    z, y, crowd_z, crowd_y = made(1, 4)
    assert torch.equal(neighbor_votes(z, y, crowd_of(crowd_z, crowd_y, [False] * 4), 3, 0.1), y)
    assert torch.equal(neighbor_votes(z, y, crowd_of(crowd_z[:0], crowd_y[:0]), 3, 0.1), y)


def test_votes_do_not_depend_on_the_scale_of_features() -> None:
    z, y, crowd_z, crowd_y = made(4, 12)
    crowd = crowd_of(crowd_z, crowd_y)
    torch.testing.assert_close(neighbor_votes(100 * z, y, crowd, 5, 0.1), neighbor_votes(z, y, crowd, 5, 0.1))


def test_few_samples_have_few_neighbors() -> None:
    """Of six samples in three classes that are as frequent only two can be of one class."""
    z, y, *_ = made(6, 0)
    none = Crowd(z[:0], y[:0], torch.zeros(0, dtype=torch.bool))
    torch.testing.assert_close(neighbor_votes(z, y, none, 2, 0.1), neighbor_votes(z, y, none, 5, 0.1))
    assert not torch.allclose(neighbor_votes(z, y, none, 1, 0.1), neighbor_votes(z, y, none, 5, 0.1))


def test_labels_stay_distributions_in_half_precision() -> None:
    z, y, crowd_z, crowd_y = (value.bfloat16() for value in made(4, 12))
    found = neighbor_votes(z, y, crowd_of(crowd_z, crowd_y), 5, 0.1)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float().sum(-1), torch.ones(4), atol=2e-2, rtol=0)


def test_features_of_zero_have_neighbors_like_any_other() -> None:
    z, y, crowd_z, crowd_y = made(2, 6)
    found = neighbor_votes(torch.zeros_like(z), y, crowd_of(crowd_z, crowd_y), 3, 0.1)
    assert found.isfinite().all()
