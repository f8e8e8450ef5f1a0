"""Work made ahead of time comes in order, once, and stops when nobody wants it any more."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from vicinal.data import feeding
from vicinal.data.feeding import AHEAD, WORKERS, fetched_by, made_ahead, workers_for
from vicinal.data.pixels import Chain, Pixels, joined

COUNTS = [0, 1, 3]


@pytest.fixture
def no_threads_left() -> Iterator[None]:
    """See that a test leaves no thread behind."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.mark.parametrize("workers", COUNTS)
@pytest.mark.parametrize("count", [0, 1, AHEAD, AHEAD + 1, 40])
def test_results_come_in_order_and_once(workers: int, count: int) -> None:
    def make(plan: int) -> int:
        time.sleep(0.002 if plan % 3 == 0 else 0)  # the first are the last to be ready
        return plan * plan

    assert list(made_ahead(iter(range(count)), make, workers)) == [plan * plan for plan in range(count)]


@pytest.mark.parametrize("workers", COUNTS)
def test_plans_are_drawn_one_after_another_in_the_callers_thread(workers: int) -> None:
    drawn: list[tuple[int, int]] = []

    def plans() -> Iterator[int]:
        for plan in range(20):
            drawn.append((plan, threading.get_ident()))
            yield plan

    made = list(made_ahead(plans(), lambda plan: (plan, threading.get_ident()), workers))
    assert drawn == [(plan, threading.get_ident()) for plan in range(20)]
    assert all((thread == threading.get_ident()) == (workers == 0) for _, thread in made)


@pytest.mark.parametrize("workers", COUNTS)
def test_only_a_few_are_made_ahead(workers: int) -> None:
    drawn = 0

    def plans() -> Iterator[int]:
        nonlocal drawn
        for plan in range(1000):
            drawn += 1
            yield plan

    results = made_ahead(plans(), lambda plan: plan, workers)
    for taken in range(1, 31):
        next(results)
        assert taken <= drawn <= taken + AHEAD
    if workers:
        assert drawn == 30 + AHEAD
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", COUNTS)
def test_an_error_comes_at_its_place_and_ends_everything(workers: int) -> None:
    def make(plan: int) -> int:
        if plan == 7:
            raise ValueError("seven")
        return plan

    results = made_ahead(range(50), make, workers)
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="seven"):
        next(results)
    assert list(results) == []


@pytest.mark.parametrize("workers", COUNTS)
def test_an_error_in_the_plans_reaches_the_caller(workers: int) -> None:
    def plans() -> Iterator[int]:
        yield 1
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        list(made_ahead(plans(), lambda plan: plan, workers))


@pytest.mark.parametrize("how", ["close", "forget", "raise"])
def test_a_consumer_that_stops_early_stops_the_threads(how: str) -> None:
    before, made = threading.active_count(), []

    def make(plan: int) -> int:
        time.sleep(0.001)
        made.append(plan)
        return plan

    def consume() -> None:
        for result in made_ahead(range(10_000), make, 3):
            assert threading.active_count() > before
            if result == 5:
                if how == "raise":
                    raise RuntimeError("enough")
                return

    if how == "raise":
        with pytest.raises(RuntimeError, match="enough"):
            consume()
    elif how == "forget":
        consume()
    else:
        results = made_ahead(range(10_000), make, 3)
        next(results)
        results.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    reached = len(made)
    assert reached <= 6 + AHEAD
    time.sleep(0.02)
    assert len(made) == reached


def test_several_workers_work_at_once() -> None:
    together = threading.Barrier(3, timeout=10)
    assert list(made_ahead(range(3), lambda plan: together.wait() >= 0, 3)) == [True] * 3


def images(count: int, device: str = "cpu") -> torch.Tensor:
    return torch.empty(count, 3, 10, 10, dtype=torch.uint8, device=device)


def test_images_that_live_on_the_device_need_no_workers() -> None:
    assert workers_for([images(4), Pixels(images(9), torch.arange(3))], "cpu") == 0
    assert workers_for([images(4, "meta")], "meta") == 0


def test_images_that_live_elsewhere_need_workers() -> None:
    assert WORKERS > 0
    assert workers_for([images(4)], "cuda") == WORKERS
    assert workers_for([images(4, "meta"), images(4)], "meta") == WORKERS


def test_images_past_the_page_cache_need_workers_even_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    view, chain = Pixels(images(1), torch.zeros(7, dtype=torch.int64)), joined([images(4), images(3)])
    assert isinstance(chain, Chain)
    for limit, workers in ((2101, 0), (2100, WORKERS)):
        monkeypatch.setattr(feeding, "LARGE_BYTES", limit)
        assert workers_for([view], "cpu") == workers_for([chain], "cpu") == workers


def test_only_a_gpu_fetches_by_itself() -> None:
    assert fetched_by("cuda:1")
    assert not fetched_by("cpu")
    assert not fetched_by(torch.device("meta"))


def test_what_waits_to_be_made_is_dropped() -> None:
    made: list[int] = []

    def make(plan: int) -> int:
        time.sleep(0.02)
        made.append(plan)
        return plan

    results = made_ahead(range(100), make, 1)
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(made) < 1 + AHEAD  # one more may have been in the making
