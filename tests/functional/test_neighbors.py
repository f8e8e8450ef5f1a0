"""Votes of nearest neighbors, held against loops over samples in double precision."""

import math

import pytest
import torch
from torch import Tensor

from vicinal.functional.neighbors import neighbor_votes, voted_labels
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


def rounds_by_hand(
    z: Tensor, y: Tensor, crowd_z: Tensor, crowd_y: Tensor, k: int, tau: float, share: float, rounds: int
) -> Tensor:
    """Everybody is labelled by a loop in every round; who asks whom follows from features alone."""
    everyone, own = torch.cat([z, crowd_z]), torch.cat([y, crowd_y])
    said = own
    for number in range(rounds):
        heard = said**2 / (said**2).sum(-1, keepdim=True) if number else said
        votes = torch.tensor(votes_by_hand(everyone, heard, z[:0], y[:0], k, tau), dtype=torch.double)
        said = (1 - share) * own + share * votes
    return said[: len(z)]


@pytest.mark.parametrize(
    ("batch", "crowd", "k"), [(4, 30, 5), (4, 30, 20), (6, 0, 10), (1, 9, 2), (3, 2, 1), (5, 8, 50)]
)
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("classes", [2, 3])
def test_rounds_are_those_of_a_loop(batch: int, crowd: int, k: int, rounds: int, classes: int) -> None:
    z, y, crowd_z, crowd_y = made(batch, crowd, classes)
    found = voted_labels(z, y, crowd_of(crowd_z, crowd_y), k, 0.1, 0.7, rounds)
    torch.testing.assert_close(found, rounds_by_hand(z, y, crowd_z, crowd_y, k, 0.1, 0.7, rounds))


def test_room_for_samples_votes_in_no_round() -> None:
    z, y, crowd_z, crowd_y = made(3, 8)
    known = [True, False, True, True, False, False, True, False]
    kept = [index for index, there in enumerate(known) if there]
    crowd_y = torch.where(torch.tensor(known)[:, None], crowd_y, torch.zeros(()).double())  # as it begins
    found = voted_labels(z, y, crowd_of(crowd_z, crowd_y, known), 4, 0.1, 0.8, 3)
    expected = voted_labels(z, y, crowd_of(crowd_z[kept], crowd_y[kept]), 4, 0.1, 0.8, 3)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_sample_without_neighbors_keeps_its_label_in_every_round(rounds: int) -> None:
    z, y, crowd_z, crowd_y = made(1, 4)
    nobody = crowd_of(crowd_z, torch.zeros_like(crowd_y), [False] * 4)
    torch.testing.assert_close(voted_labels(z, y, nobody, 3, 0.1, 0.8, rounds), y)
