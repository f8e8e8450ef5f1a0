"""What every adapter does around its method: an observer is shown a prediction, a bad batch is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.guard import Guarded
from vicinal.adapters.methods import adapt
from vicinal.errors import AdapterError
from vicinal.models.classifier import Classifier


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


NEVER_THE_SAME = {  # methods whose state a batch of huge pixels leaves without numbers, by their options
    "tent": {"statistics": "stream"},
    "delta": {},
    "vnl": {},
}


class Bare(nn.Module):
    """A classifier of somebody's own, which takes pixels of any size."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.body, self.head = model.float(), model.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body.embed(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", NEVER_THE_SAME)
def test_predictions_that_are_no_numbers_are_the_last_of_their_kind(
    method: str, make_source: Any, images: Any
) -> None:
    made = [adapt(Bare(make_source().model), method, **NEVER_THE_SAME[method]) for _ in range(2)]
    adapter, fresh = made
    batches = [images(6, seed=seed).float() for seed in range(6)]
    adapter(batches[0])
    adapter(1e20 * batches[1])
    with pytest.warns(UserWarning, match="not numbers: the adapter went back to its source"):
        found = [adapter(x) for x in batches[2:]]
    lost = sum(bool(logits.isnan().any()) for logits in found)
    assert lost <= 1
    assert adapter.recovered == 1
    for logits, x in zip(found[lost:], batches[2 + lost :], strict=True):
        torch.testing.assert_close(logits, fresh(x), rtol=0, atol=0)
    adapter.reset()
    assert adapter.recovered == 0


def test_a_guard_that_goes_back_itself_leaves_nothing_to_recover(make_source: Any, images: Any) -> None:
    guarded = Guarded(adapt(Bare(make_source().model), "vnl"))
    for seed in range(6):
        assert guarded((1e20 if seed == 2 else 1) * images(6, seed=seed).float()).isfinite().all()
    assert guarded.adapter.recovered == 0
    assert any(event.signal == "finite" for event in guarded.events)


def test_logits_of_classes_that_are_out_of_question_may_be_infinite(make_source: Any, images: Any) -> None:
    class Masked(Bare):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).index_fill(1, torch.tensor([0]), -torch.inf)

    adapter = adapt(Masked(make_source().model), "bn", statistics="stream")
    for seed in range(3):
        adapter(images(6, seed=seed).float())
    assert (adapter.recovered, adapter.steps_taken) == (0, 3)
