"""Places in a ring, against a list that drops its oldest."""

from collections import deque

import pytest
import torch

from vicinal.adapters.ring import next_places, taken


@pytest.mark.parametrize("counts", [(3, 4, 2), (1, 1, 8), (20, 3), (5, 11), (2,), (7, 7)])
def test_the_last_samples_are_there_and_no_others(counts: tuple[int, ...]) -> None:
    size, count, start = 7, torch.zeros((), dtype=torch.long), 0
    ring, last = torch.full((size,), -1), deque[int](maxlen=size)
    for new in counts:
        samples = torch.arange(start, start + new)
        places = next_places(count, size, new)
        assert len(places.unique()) == len(places) == min(new, size)
        ring[places] = samples[-size:]
        last.extend(samples.tolist())
        count, start = count + new, start + new
        assert sorted(ring[taken(count, size)].tolist()) == list(last)
