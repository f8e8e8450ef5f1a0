"""What every adapter makes of odd streams, and what it refuses without a trace."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vicinal.errors import AdapterError

Case = Any  # conftest.Case


def check(logits: Tensor, count: int) -> None:
    assert logits.shape == (count, 4)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits.softmax(-1).sum(-1), torch.ones(count))


def test_images_one_at_a_time(case: Case) -> None:
    adapter = case.adapt()
    for batch in case.stream(1, 1, 1, 4, 1):
        check(adapter(batch), len(batch))


def test_all_images_identical(case: Case) -> None:
    adapter = case.adapt()
    for seed in (0, 0, 1):
        batch = case.images(1, seed).expand(6, -1, -1, -1)
        logits = adapter(batch)
        check(logits, 6)
        torch.testing.assert_close(logits, logits[:1].expand_as(logits), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_images_without_content(batch_norm_case: Case, value: float) -> None:
    adapter = batch_norm_case.adapt()
    for count in (6, 1, 5):
        check(adapter(torch.full_like(batch_norm_case.images(count), value)), count)


@pytest.mark.parametrize("bias", [-1e4, 1e4], ids=["absent", "alone"])
def test_a_class_that_is_absent_or_the_only_one(case: Case, bias: float) -> None:
    source = case.source()
    with torch.no_grad():
        source.model.head.bias[2] = bias  # beyond what float32 keeps of a softmax: exact zeros and ones
    adapter = case.adapt(source)
    for batch in case.stream(6, 5, 1):
        logits = adapter(batch)
        check(logits, len(batch))
        assert (logits.argmax(-1) == 2).all() == (bias > 0)


@pytest.mark.parametrize("kind", ["batch", "stream"])
def test_a_class_that_stops_coming(batch_norm_case: Case, kind: str) -> None:
    adapter = batch_norm_case.adapt(statistics=kind)
    plain = batch_norm_case.source().model.eval()
    pool = batch_norm_case.images(64, seed=3)
    told = plain(pool).argmax(-1)
    check(adapter(pool[:8]), 8)
    for label in told.unique()[:2]:
        alone = pool[told == label][:6]
        check(adapter(alone), len(alone))


REFUSED = {
    "not a number": lambda x: x.index_fill(0, torch.tensor(1), torch.nan),
    "infinite": lambda x: x.index_fill(0, torch.tensor(1), -torch.inf),
    "integers": lambda x: (255 * x).to(torch.uint8),
    "wide integers": lambda x: (255 * x).long(),
    "one channel": lambda x: x[:, :1],
    "four channels": lambda x: torch.cat([x, x[:, :1]], 1),
    "no image": lambda x: x[:0],
    "one image without a batch": lambda x: x[0],
    "a batch of batches": lambda x: x[None],
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_refused_leaves_no_trace(batch_norm_case: Case, wrong: str) -> None:
    first, second = batch_norm_case.stream(6, 5)
    twin = batch_norm_case.adapt()
    twin(first)
    adapter = batch_norm_case.adapt()
    adapter(first)
    before = batch_norm_case.fingerprint(adapter)
    with pytest.raises(AdapterError) as caught:
        adapter(REFUSED[wrong](second))
    assert "\n" not in str(caught.value)
    assert batch_norm_case.fingerprint(adapter) == before
    assert torch.equal(adapter(second), twin(second))


@pytest.mark.parametrize("wrong", ["not a number", "no image"])
def test_an_episodic_adapter_refuses_before_it_forgets(batch_norm_case: Case, wrong: str) -> None:
    adapter = batch_norm_case.adapt(episodic=True)
    adapter(batch_norm_case.images(6))
    before = batch_norm_case.fingerprint(adapter)
    with pytest.raises(AdapterError):
        adapter(REFUSED[wrong](batch_norm_case.images(6)))
    assert batch_norm_case.fingerprint(adapter) == before


def test_inference_mode_is_refused_with_a_way_out(case: Case) -> None:
    adapter, x = case.adapt(), case.images(6)
    before = case.fingerprint(adapter)
    with torch.inference_mode(), pytest.raises(AdapterError, match=r"outside torch\.inference_mode"):
        adapter(x)
    assert case.fingerprint(adapter) == before


def test_images_made_in_inference_mode_are_as_good_as_others(case: Case) -> None:
    with torch.inference_mode():
        batches = case.stream(6, 5, 1)
    assert batches[0].is_inference()
    adapter, twin = case.adapt(), case.adapt()
    for batch in batches:
        assert torch.equal(adapter(batch), twin(torch.tensor(batch.tolist())))


def test_a_reset_in_inference_mode_leaves_a_working_adapter(batch_norm_case: Case) -> None:
    adapter, batches = batch_norm_case.adapt(), batch_norm_case.stream(6, 5)
    first = [adapter(batch) for batch in batches]
    with torch.inference_mode():
        adapter.reset()
    for batch, expected in zip(batches, first, strict=True):
        assert torch.equal(adapter(batch), expected)


@pytest.mark.parametrize("method", ["hard", "vnl"])
def test_an_adapter_made_or_restored_in_inference_mode_works_outside(make_case: Any, method: str) -> None:
    case = make_case(method, "small")
    first, second = case.stream(6, 5)
    twin = case.adapt()
    twin(first)
    with torch.inference_mode():
        adapter = case.adapt()
        adapter.load_state_dict(twin.state_dict())
    assert torch.equal(adapter(second), twin(second))


@pytest.mark.parametrize("method", ["erm", "vnl"])
def test_images_in_double_precision_are_as_good_as_others(make_case: Any, method: str) -> None:
    case = make_case(method, "small")
    x = case.images(6)
    assert torch.equal(case.adapt()(x.double()), case.adapt()(x))


def test_the_batch_given_is_not_written_to(batch_norm_case: Case) -> None:
    x = batch_norm_case.images(6)
    before = x.clone()
    batch_norm_case.adapt()(x)
    assert torch.equal(x, before)
    assert x.grad is None


def test_the_layout_of_the_batch_in_memory_does_not_matter(batch_norm_case: Case) -> None:
    x = batch_norm_case.images(6)
    strided = x.transpose(2, 3).contiguous().transpose(2, 3)
    assert not strided.is_contiguous()
    close = batch_norm_case.adapt()(strided), batch_norm_case.adapt()(x)
    torch.testing.assert_close(*close, rtol=1e-4, atol=1e-4)
