"""Which cases are measured on which device; building one is another test's matter."""

import pytest
import torch

from vicinal.benchmarks.bench import goals
from vicinal.benchmarks.bench.cases import Case
from vicinal.benchmarks.bench.lineup import (
    GROWING,
    LOOPS,
    PROFILED,
    erm_cases,
    goal_groups,
    growing_cases,
    growing_shapes,
    profiled_cases,
)
from vicinal.benchmarks.bench.plain_erm import Loop
from vicinal.benchmarks.bench.records import SECTIONS
from vicinal.benchmarks.bench.scale import FULL, QUICK, SMALL, Scale

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def test_a_gpu_has_every_plain_loop_and_a_cpu_the_one() -> None:
    assert names(erm_cases(FULL.shape, GPU)) == [*goals.PLAIN, goals.ERM, goals.ERM + goals.COMPILED]
    assert names(erm_cases(FULL.shape, CPU)) == [goals.PLAIN[0], goals.ERM]


def test_loops_do_what_their_names_say() -> None:
    for name, loop in LOOPS.items():
        assert loop.half == ("autocast" in name)
        assert loop.captured == ("captured" in name)
        assert bool(loop.compiled) == ("compiled" in name) == (name in goals.PLAIN_COMPILED)
        assert (loop.compiled == "reduce-overhead") == ("reduce-overhead" in name)
    assert LOOPS[goals.PLAIN[0]] == Loop()


def test_what_hides_its_arithmetic_has_that_of_a_case_before_it() -> None:
    seen: set[str] = set()
    for case in erm_cases(FULL.shape, GPU):
        hidden = "compiled" in case.name or "captured" in case.name
        assert (case.same_as in seen) == hidden
        seen.add(case.name)


@pytest.mark.parametrize(("scale", "device"), [(FULL, GPU), (SMALL, CPU), (QUICK, CPU)])
def test_sections_are_there_as_a_scale_says(scale: Scale, device: torch.device) -> None:
    stepwise = dict(goal_groups(scale, device))
    assert list(stepwise) == [name for name in SECTIONS[:3] if scale.measures(name)]
    for goal in goals.GOALS:
        if goal.group in stepwise and (device == GPU or goals.COMPILED not in goal.subject):
            assert goal.subject in names(stepwise[goal.group])
            assert set(goal.against) & set(names(stepwise[goal.group]))


def test_vicinals_own_steps_are_profiled() -> None:
    assert set(names(profiled_cases(FULL, GPU))) == set(PROFILED)
    assert len(profiled_cases(QUICK, CPU)) == len(PROFILED)


@pytest.mark.parametrize("subject", GROWING)
def test_growth_has_a_case_for_each_value(subject: str) -> None:
    cases = growing_cases(subject, growing_shapes(FULL, "size"), GPU)
    assert [(case.name, case.shape.size) for case in cases] == [("112", 112), ("160", 160), ("224", 224)]


def test_the_step_that_grows_is_that_of_the_goals() -> None:
    (grown,) = growing_cases(goals.ANCHORED, {"224": FULL.shape}, GPU)
    same = next(case for case in dict(goal_groups(FULL, GPU))["adaptation"] if case.name == goals.ANCHORED)
    assert (grown.build.args, grown.build.keywords) == (same.build.args, same.build.keywords)  # type: ignore[attr-defined]
