"""What every adapter does around its method: an observer is shown a prediction, a bad batch is refused."""

from typing import Any

import pytest
import torch

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.methods import adapt
from vicinal.errors import AdapterError


def test_the_observer_sees_what_predicts(make_source: Any, images: Any) -> None:
    adapter, x = adapt(make_source(), "hard"), images(6)
    heard: list[Any] = []
    adapter.observer = lambda z, logits, head: heard.append((z, logits, head))
    found = adapter(x)
    ((z, logits, head),) = heard
    assert torch.equal(logits, found)
    torch.testing.assert_close(z @ head.weight.T + head.bias, logits)


def test_a_refused_batch_names_what_it_should_have_been(make_source: Any, images: Any) -> None:
    adapter = adapt(make_source(), "erm")
    with pytest.raises(AdapterError, match=r"\(N >= 1, 3, H, W\), got \(6, 1, 8, 8\)"):
        adapter(images(6)[:, :1])
    with pytest.raises(AdapterError, match=r"torch.uint8: divide by 255"):
        adapter((255 * images(6)).byte())
    with pytest.raises(AdapterError, match="not finite: it was refused, nothing was updated"):
        adapter(images(6) / 0)
