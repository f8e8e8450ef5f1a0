"""Calls from several threads: each gets what it would get if the others waited."""

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.guard import GuardConfig, Guarded
from vicinal.adapters.methods import adapt
from vicinal.adapters.watch import Limits

THREADS, CALLS = 4, 60
ANY = Limits(agreement=0.0, doubt=0.0, excess_entropy=10.0)
UNALARMED = GuardConfig(one_sided=ANY, varied=ANY, pooled=ANY, lost_diversity=10.0, interval=2)


@pytest.fixture(autouse=True)
def hasty() -> Iterator[None]:
    """Let threads interrupt each other as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(call: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(call, range(CALLS)))


@pytest.mark.parametrize("guard", [False, True])
def test_every_thread_gets_the_logits_of_its_own_batch(make_source: Any, images: Any, guard: bool) -> None:
    source, batches = make_source(), [images(4 + index % 3, index) for index in range(CALLS)]
    adapter: Any = adapt(source, "bn")
    expected = [adapter(batch) for batch in batches]
    adapter.reset()
    shared = Guarded(adapter, UNALARMED) if guard else adapter
    # Every call is one on its own: on statistics of the batch nothing is left for the next one.
    for found, right in zip(at_once(lambda index: shared(batches[index])), expected, strict=True):
        assert torch.equal(found, right)
    assert shared.steps_taken == CALLS


def test_updates_and_resets_come_one_after_another(make_source: Any, images: Any) -> None:
    adapter, batch = adapt(make_source(), "tent", lr=1e-2), images(6)
    after: list[Tensor] = [adapter(batch) for _ in range(CALLS)]  # so many updates after a reset
    adapter.reset()

    def call(index: int) -> Tensor | None:
        return adapter.reset() if index % 5 == 4 else adapter(batch)

    for found in at_once(call):
        assert found is None or any(torch.equal(found, known) for known in after)


def test_a_prediction_has_the_draws_of_its_own_batch(make_source: Any, images: Any) -> None:
    adapter = adapt(make_source(), "vnl", update="none", num_samples=4)
    sizes = [2 + index % 3 for index in range(CALLS)]
    for size, found in zip(
        sizes, at_once(lambda index: adapter.predict(images(sizes[index], index))), strict=True
    ):
        assert found.spread is not None
        assert len(found.spread) == len(found.label) == size


CALLED: dict[str, Callable[[Any, Tensor, Path], Any]] = {
    "forward": lambda thing, x, path: thing(x),
    "predict": lambda thing, x, path: thing.predict(x),
    "export": lambda thing, x, path: thing.export(x),
    "save": lambda thing, x, path: thing.save(path / "stream.safetensors"),
    "reset": lambda thing, x, path: thing.reset(),
    "state_dict": lambda thing, x, path: thing.state_dict(),
    "extra state": lambda thing, x, path: thing.get_extra_state(),
    "double": lambda thing, x, path: thing.double(),
    "report": lambda thing, x, path: thing.report() if isinstance(thing, Guarded) else thing.reset(),
}


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("guard", [False, True])
def test_a_call_waits_for_the_one_that_is_being_made(
    make_source: Any, images: Any, tmp_path: Path, name: str, guard: bool
) -> None:
    adapter = adapt(make_source(), "tent")
    thing: Any = Guarded(adapter) if guard else adapter
    if guard:
        thing.watch.resting = 2  # the source predicts: not the adapter's call is waited for, but the guard's
    x = images(6)
    with ThreadPoolExecutor(1) as pool:
        with thing.lock:
            call = pool.submit(CALLED[name], thing, x, tmp_path)
            with pytest.raises(TimeoutError):
                call.result(timeout=0.05)
        call.result(timeout=60)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
@pytest.mark.parametrize("guard", [False, True])
def test_a_copy_has_a_lock_of_its_own(make_source: Any, images: Any, again: Any, guard: bool) -> None:
    adapter: Adapter = adapt(make_source(), "tent")
    thing: Any = Guarded(adapter) if guard else adapter
    thing(images(6))
    with thing.lock:
        twin = again(thing)
        found = ThreadPoolExecutor(1).submit(twin, images(6, 1)).result(timeout=60)
    assert torch.equal(found, thing(images(6, 1)))
