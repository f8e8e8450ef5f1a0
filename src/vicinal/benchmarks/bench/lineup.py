"""Which cases are timed together: each group in turn, round by round."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from vicinal.benchmarks.bench import goals
from vicinal.benchmarks.bench.cases import Case, adapter_case, training_case
from vicinal.benchmarks.bench.plain_erm import Loop, plain_case
from vicinal.benchmarks.bench.references import unrolled_case
from vicinal.benchmarks.bench.scale import Scale, Shape

GROWING = (goals.ERM, goals.FIRST, goals.ANCHORED)
LOOPS = dict(
    zip(
        goals.PLAIN,
        (
            Loop(),
            Loop(half=True),
            Loop(half=True, captured=True),
            Loop(half=True, compiled="default"),
            Loop(half=True, compiled="reduce-overhead"),
            Loop(half=True, compiled="default", captured=True),
        ),
        strict=True,
    )
)
PROFILED = (goals.ERM, goals.FIRST, goals.SECOND, goals.VNL, goals.ANCHORED)


def erm_cases(shape: Shape, device: torch.device) -> list[Case]:
    """Return the plain loop in its variants, and vicinal's own step."""
    return [*plain_cases(shape, device), *both_ways(goals.ERM, "erm", shape, device)]


def plain_cases(shape: Shape, device: torch.device) -> list[Case]:
    """Return the plain loop in its variants, on a CPU the one."""
    full, half, *_ = goals.PLAIN
    if device.type != "cuda":  # half precision and a compiler gain little there and cost minutes
        return [plain_case(full, shape, device, LOOPS[full])]
    hidden = {name: half for name, loop in LOOPS.items() if loop.compiled or loop.captured}
    return [plain_case(name, shape, device, loop, hidden.get(name, "")) for name, loop in LOOPS.items()]


def both_ways(name: str, algorithm: str, shape: Shape, device: torch.device, **options: Any) -> list[Case]:
    """Return a training step of vicinal's as it is, and on a GPU with its net compiled."""
    cases = [training_case(name, algorithm, shape, device, **options)]
    if device.type == "cuda":
        compiled = training_case(name + goals.COMPILED, algorithm, shape, device, compile=True, **options)
        cases.append(replace(compiled, same_as=name))
    return cases


def meta_cases(shape: Shape, device: torch.device) -> list[Case]:
    """Return vicinal's iteration in both orders, and the same by autograd alone."""
    return [
        *both_ways(goals.FIRST, "meta", shape, device),
        *both_ways(goals.SECOND, "meta", shape, device, second_order=True),
        unrolled_case(goals.UNROLLED, shape, device, exact=False),
        unrolled_case(goals.DOUBLE, shape, device, exact=True),
    ]


def adapter_cases(shape: Shape, device: torch.device) -> list[Case]:
    """Return test-time steps, from none to the dearest."""
    return [
        adapter_case("no adaptation", "erm", shape, device),
        adapter_case("tent, norm layers", "tent", shape, device),
        adapter_case(goals.TENT, "tent", shape, device, parameters="all"),
        adapter_case(
            goals.TENT + ", predicted after", "tent", shape, device, parameters="all", predict="own"
        ),
        adapter_case(goals.VNL, "vnl", shape, device, update="entropy"),
        adapter_case(goals.ANCHORED, "vnl", shape, device, update="marginal"),
    ]


def goal_groups(scale: Scale, device: torch.device) -> Iterator[tuple[str, list[Case]]]:
    """Yield the groups that the goals speak of."""
    shape = scale.shape
    yield "training", [*erm_cases(shape, device), *meta_cases(shape, device)]
    if scale.deeper is not None:
        yield "deeper", meta_cases(replace(shape, backbone=scale.deeper), device)
    yield "adaptation", adapter_cases(shape, device)


def profiled_cases(scale: Scale, device: torch.device) -> list[Case]:
    """Return vicinal's own steps, to be looked into."""
    shape = scale.shape
    every = [*erm_cases(shape, device), *meta_cases(shape, device), *adapter_cases(shape, device)]
    return [case for case in every if case.name in PROFILED]


def growing_shapes(scale: Scale, axis: str) -> dict[str, Shape]:
    """Return the shapes along one axis, by its values."""
    return {str(value): scale.shape.along(axis, value) for value in scale.growth[axis]}


def growing_cases(subject: str, shapes: Mapping[str, Shape], device: torch.device) -> list[Case]:
    """Return one of vicinal's steps at each of these shapes."""
    if subject == goals.ANCHORED:
        return [adapter_case(name, "vnl", shape, device, update="marginal") for name, shape in shapes.items()]
    algorithm = "erm" if subject == goals.ERM else "meta"
    return [training_case(name, algorithm, shape, device) for name, shape in shapes.items()]
