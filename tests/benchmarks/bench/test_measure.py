"""Cases that work and cases that do not, measured together."""

from dataclasses import replace
from functools import partial

import torch

from vicinal.benchmarks.bench.cases import Case
from vicinal.benchmarks.bench.measure import measure
from vicinal.benchmarks.bench.scale import Shape
from vicinal.benchmarks.bench.timing import Work

CPU = torch.device("cpu")
SHAPE = Shape("small", 8, 2, 2)


def product(size: int) -> Work:
    a = torch.ones(size, size)
    return lambda: a @ a


def unbuildable() -> Work:
    raise MemoryError("too large")


def unrunnable() -> Work:
    def work() -> None:
        raise RuntimeError("no such kernel")

    return work


def late() -> Work:
    calls = []

    def work() -> None:
        calls.append(None)
        if len(calls) > 3:  # warm-up, its timing, the first round
            raise RuntimeError("worn out")

    return work


def case(name: str, build: object, same_as: str = "") -> Case:
    return Case(name, SHAPE, 4, build, same_as)  # type: ignore[arg-type]


def test_cases_that_fail_say_why_and_the_rest_is_measured() -> None:
    cases = [
        case("a", lambda: product(32)),
        case("unbuildable", unbuildable),
        case("unrunnable", unrunnable),
        case("late", late),
        case("b", lambda: product(64)),
    ]
    found = {one.case.name: one for one in measure(cases, CPU, 3, 0.0)}
    assert list(found) == [one.name for one in cases]
    assert found["unbuildable"].timed.error == "MemoryError: too large"
    assert found["unrunnable"].timed.error == "RuntimeError: no such kernel"
    assert found["late"].timed.error == "RuntimeError: worn out"
    for name, size in (("a", 32), ("b", 64)):
        assert len(found[name].timed.rounds) == 3
        assert min(found[name].timed.rounds) > 0
        assert found[name].count is not None
        assert found[name].count.flops == 2 * size**3
    assert found["unrunnable"].count is None


def test_what_cannot_be_counted_says_why_and_is_timed() -> None:
    built = []

    def shy() -> Work:
        built.append(None)
        if len(built) == 1:  # the copy that is counted
            raise RuntimeError("not with somebody watching")
        return product(8)

    (found,) = measure([case("shy", shy)], CPU, 2, 0.0)
    assert (found.count, found.uncounted) == (None, "RuntimeError: not with somebody watching")
    assert len(found.timed.rounds) == 2
    assert found.timed.error == ""


def test_a_case_that_must_be_first_is_built_first_and_listed_in_its_place() -> None:
    built = []

    def named(name: str) -> Work:
        built.append(name)
        return product(4)

    cases = [case(name, partial(named, name)) for name in ("a", "b", "c")]
    cases[1] = replace(cases[1], early=True)
    found = measure(cases, CPU, 1, 0.0, count=False)
    assert built == ["b", "a", "c"]
    assert [one.case.name for one in found] == ["a", "b", "c"]


def test_the_count_of_a_case_that_hides_its_own_is_another_s() -> None:
    built = []

    def hidden() -> Work:
        built.append(None)
        return product(16)

    found = measure([case("a", lambda: product(32)), case("hidden", hidden, same_as="a")], CPU, 1, 0.0)
    assert found[1].count == found[0].count is not None
    assert len(built) == 1  # to be timed, never to be counted


def test_counting_can_be_left_out() -> None:
    (found,) = measure([case("a", lambda: product(8))], CPU, 2, 0.0, count=False)
    assert found.count is None
    assert len(found.timed.rounds) == 2
