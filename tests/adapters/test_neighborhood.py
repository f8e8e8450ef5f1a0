"""Who is remembered of a stream, and how they label the next batch."""

import torch
from torch.nn import functional as F

from vicinal.adapters.neighborhood import Neighborhood
from vicinal.functional.neighbors import neighbor_votes
from vicinal.types import Crowd, Head


def made(size: int, features: int = 4, classes: int = 3) -> Neighborhood:
    return Neighborhood(size, Head(torch.zeros(classes, features), torch.zeros(classes)))


def batches(*counts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 4, generator=generator), torch.randn(n, 3, generator=generator).softmax(-1))
        for n in counts
    ]


def test_it_remembers_the_last_samples_whatever_the_batches() -> None:
    for counts in ((3, 4, 2), (1, 1, 8), (20, 3), (5, 11), (2,)):
        neighborhood, stream = made(7), batches(*counts)
        for z, y in stream:
            neighborhood.keep(z, y)
        crowd, last = neighborhood.crowd, min(7, sum(counts))
        z, y = (torch.cat(values)[-last:] for values in zip(*stream, strict=True))
        assert int(crowd.known.sum()) == last
        found = {tuple(row) for row in torch.cat([crowd.z, crowd.y], -1)[crowd.known].tolist()}
        assert found == {tuple(row) for row in torch.cat([F.normalize(z, dim=-1), y], -1).tolist()}


def test_labels_are_votes_of_all_that_is_remembered_mixed_with_own_ones() -> None:
    neighborhood, ((z, y), (new, own)) = made(30), batches(12, 5)
    neighborhood.keep(z, y)
    crowd = Crowd(F.normalize(z, dim=-1), y, torch.ones(12, dtype=torch.bool))
    votes = neighbor_votes(new, own, crowd, 4, 0.2)
    torch.testing.assert_close(neighborhood(new, own, 4, 0.2, 0.7), 0.3 * own + 0.7 * votes)
    assert torch.equal(neighborhood(new, own, 4, 0.2, 0.0), own)


def test_labelling_remembers_nothing() -> None:
    neighborhood, ((z, y),) = made(9), batches(5)
    neighborhood(z, y, 3, 0.1, 0.8)
    assert int(neighborhood.count) == 0


def test_without_features_own_labels_stand() -> None:
    neighborhood, ((_, y),) = made(9), batches(5)
    nothing = torch.zeros(5, 0)
    neighborhood.keep(nothing, y)
    assert torch.equal(neighborhood(nothing, y, 3, 0.1, 0.8), y)
    assert int(neighborhood.count) == 0


def test_a_state_continues_the_stream() -> None:
    one, other, stream = made(6), made(6), batches(4, 4, 4)
    one.keep(*stream[0])
    other.load_state_dict(one.state_dict())
    for neighborhood in (one, other):
        neighborhood.keep(*stream[1])
    assert torch.equal(one(*stream[2], 3, 0.1, 0.8), other(*stream[2], 3, 0.1, 0.8))
