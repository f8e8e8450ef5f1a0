"""Cases that work and cases that do not, measured together."""

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


def test_the_count_of_a_case_that_hides_its_own_is_another_s() -> None:
    built = []

    def hidden() -> Work:
        built.append(None)
        return product(16)

    found = measure([case("a", lambda: product(32)), case("hidden", hidden, same_as="a")], CPU, 1, 0.0)
    assert found[1].count == found[0].count
    assert len(built) == 1  # to be timed, never to be counted


def test_counting_can_be_left_out() -> None:
    (found,) = measure([case("a", lambda: product(8))], CPU, 2, 0.0, count=False)
    assert found.count is None
    assert len(found.timed.rounds) == 2
