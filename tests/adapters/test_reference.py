"""Whose opinion counts where a guard asks the source: by told predictions and shifts, one case a rule."""

from typing import Any

import pytest
import torch

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.methods import adapt
from vicinal.adapters.reference import Opinion, Reference


def told_apart(amount: float, certain: float = 1.0) -> torch.Tensor:
    """Return predictions (4, 4) that tell about so much of the batch apart."""
    p = torch.full((4, 4), (1 - certain) / 3, dtype=torch.float64)
    p[:, 0] = certain
    return (1 - amount) * p + amount * torch.eye(4, dtype=torch.float64)


DARK, CLEAR = told_apart(0.0, 0.99), told_apart(0.95)
LITTLE, LESS = told_apart(0.3, 0.4), told_apart(0.1, 0.4)


@pytest.mark.parametrize(
    ("own", "other", "first", "last", "by_batch"),
    [
        (DARK, CLEAR, 1.0, 0.3, True),  # statistics mend it
        (DARK, LITTLE, 1.0, 0.3, True),  # little is told apart, where the source tells nothing
        (DARK, LESS, 1.0, 0.3, False),  # too little
        (told_apart(0.2, 0.99), LITTLE, 1.0, 0.3, False),  # the source tells something apart
        (DARK, LITTLE, 0.1, 0.03, False),  # no shift: a batch of one class
        (DARK, LITTLE, 1.0, 0.8, False),  # one that statistics do not mend
    ],
)
def test_the_statistics_of_the_batch_are_believed_where_they_tell_more_apart(
    monkeypatch: pytest.MonkeyPatch,
    make_source: Any,
    own: torch.Tensor,
    other: torch.Tensor,
    first: float,
    last: float,
    by_batch: bool,
) -> None:
    reference = Reference(adapt(make_source(), "bn"), 0.05, 0.25, 0.2, 4.0)
    shifts = torch.tensor([first, last], dtype=torch.float64)
    monkeypatch.setattr(reference.norm, "observe", lambda model, x: (other.log(), shifts))
    found = reference.consensus(torch.zeros(4, 3, 8, 8), Opinion(own.log(), own))
    torch.testing.assert_close(found.p, other if by_batch else own)
