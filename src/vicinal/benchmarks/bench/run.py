"""A whole run: the goals' cases, profiles and growth, the records of a group handed over when it is done."""

import gc
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from vicinal.benchmarks.bench import goals
from vicinal.benchmarks.bench.cases import Case, extrapolated, loop_marks, model_spec, stream_seconds
from vicinal.benchmarks.bench.floor import Count, Rates, measured_rates, precision_of
from vicinal.benchmarks.bench.lineup import (
    GROWING,
    goal_groups,
    growing_cases,
    growing_shapes,
    profiled_cases,
)
from vicinal.benchmarks.bench.machine import all_versions, device_name
from vicinal.benchmarks.bench.measure import Measurement, measure
from vicinal.benchmarks.bench.memory import PeakMemory
from vicinal.benchmarks.bench.profiling import profiled
from vicinal.benchmarks.bench.records import BenchRecord, asked
from vicinal.benchmarks.bench.scale import FULL, Scale, Shape
from vicinal.benchmarks.bench.timing import reason, release
from vicinal.benchmarks.estimate import net_of
from vicinal.training.left_out import folds

LEAST_ITERATIONS = 20  # of a loop whose rate is wanted: it speaks every ten
STREAMED = ((goals.STREAM, "marginal"), (goals.STREAM_FREE, "entropy"))  # name and rule
Found = tuple[float, dict[str, Any]]  # seconds, and what else is worth a record


@dataclass(frozen=True, eq=False)
class Bench:
    """A run on one device: its size, and who takes a finished group's records and hears what is going on."""

    scale: Scale
    device: torch.device
    keep: Callable[[Sequence[BenchRecord]], None]
    say: Callable[[str], None]

    @cached_property
    def versions(self) -> dict[str, str]:
        """What the figures depend on, looked up once: the code is that of the start."""
        return all_versions(self.device)

    def run(self, parts: Collection[str]) -> None:
        """Measure the parts asked for."""
        gc.freeze()  # what is loaded stays: looking through it after every case would take half a minute
        try:
            self._goals(parts)
            if "profile" in parts:
                self._profiles()
            if "growth" in parts:
                self._growth()
        finally:
            gc.unfreeze()

    def _goals(self, parts: Collection[str]) -> None:
        stepwise = [
            (group, cases)
            for group, cases in goal_groups(self.scale, self.device)
            if asked("goals", group, parts)
        ]
        if stepwise:
            self.say("rates of matrix products and copies")
            rates = measured_rates(self.device)
            release(self.device)
        for group, cases in stepwise:
            self._measure("goals", group, cases, self.scale.rounds, rates)
        if asked("goals", "loop", parts):
            shape = self.scale.shape
            self.keep([self._once("goals", "loop", goals.LOOP, shape, 2 * shape.batch, self._loop)])
        if asked("goals", "stream", parts):
            self.keep([self._streamed(name, update) for name, update in STREAMED])

    def _loop(self) -> Found:
        marks = loop_marks(self.scale, self.scale.shape, self.device, self.scale.iterations)
        seconds = extrapolated(marks, goals.ITERATIONS)
        each = f"{1e3 * seconds / goals.ITERATIONS:.3g} ms each with drawing, augmentation and validation"
        note = f"one round, extrapolated from {self.scale.iterations}, {each}; saving to disk is not in it"
        return seconds, {"note": note, "marks": marks}

    def _streamed(self, name: str, update: str) -> BenchRecord:
        work = partial(self._stream, update)
        return self._once("goals", "stream", name, self.scale.shape, sum(FULL.streams), work)

    def _stream(self, update: str) -> Found:
        """Return the time of all images; of fewer that were run, the rate is taken, and a set-up a domain."""
        images, run = sum(FULL.streams), sum(self.scale.streams)
        taken = stream_seconds("vnl", self.scale, self.device, update=update)
        set_up = taken.set_up * len(FULL.streams) / len(self.scale.streams)
        seconds = set_up + (taken.total - taken.set_up) * images / run
        said = "one round" if run == images else f"one round, extrapolated from {run} images"
        note = f"{said}; an adapter for each target domain, {set_up:.3g} s of it set-up and recording"
        return seconds, {"note": note, "set_up_seconds": set_up}

    def _profiles(self) -> None:
        self.keep([self._profile(case) for case in profiled_cases(self.scale, self.device)])

    def _profile(self, case: Case) -> BenchRecord:
        self.say(f"profile: {case.name}")
        record = self._record("profile", "profile", case.name, case.shape, case.images)
        try:
            return replace(record, extra=asdict(profiled(case.build(), self.device)))
        except Exception as error:  # the next case may well be profiled
            return replace(record, error=reason(error))
        finally:
            release(self.device)

    def _growth(self) -> None:
        for axis in self.scale.growth:
            shapes = growing_shapes(self.scale, axis)
            if axis != "domains":
                for subject in GROWING:
                    cases = growing_cases(subject, shapes, self.device)
                    self._measure("growth", f"{axis}: {subject}", cases, self.scale.growth_rounds)
                continue
            # Domains change what is drawn, not a step: the whole loop is timed.
            group = "domains: iteration of the loop"
            self.keep(
                [
                    self._once(
                        "growth", group, value, shape, 2 * shape.batch, partial(self._iteration, shape)
                    )
                    for value, shape in shapes.items()
                ]
            )

    def _iteration(self, shape: Shape) -> Found:
        iterations = max(LEAST_ITERATIONS, self.scale.iterations // 5)
        (first, begun), *_, (last, ended) = loop_marks(self.scale, shape, self.device, iterations)
        return (ended - begun) / (last - first), {"left_out_models": len(folds(shape.domains, 0))}

    def _measure(
        self, part: str, group: str, cases: Sequence[Case], rounds: int, rates: Rates | None = None
    ) -> None:
        self.say(f"{part}: {group}")
        records = []
        for one in measure(cases, self.device, rounds, self.scale.round_seconds, count=rates is not None):
            record = self._measured(part, group, one)
            if one.count is not None and rates is not None:
                record = with_floor(record, one.count, rates, precision_of(one.count, self.device))
            records.append(record)
        self.keep(records)

    def _measured(self, part: str, group: str, one: Measurement) -> BenchRecord:
        return replace(
            self._record(part, group, one.case.name, one.case.shape, one.case.images),
            rounds=one.timed.rounds,
            repeats=one.timed.repeats,
            error=one.timed.error,
            peak_bytes=one.peak_bytes,
            extra={"uncounted": one.uncounted} if one.uncounted else {},
        )

    def _once(
        self, part: str, group: str, name: str, shape: Shape, images: int, work: Callable[[], Found]
    ) -> BenchRecord:
        """Return the record of something too long to repeat."""
        self.say(f"{part}: {group}, {name}")
        record, memory = self._record(part, group, name, shape, images), PeakMemory(self.device)
        try:
            with memory:
                seconds, extra = work()
        except Exception as error:  # a row that says why
            return replace(record, error=reason(error))
        return replace(record, rounds=(seconds,), repeats=1, extra=extra, peak_bytes=memory.bytes)

    def _record(self, part: str, group: str, name: str, shape: Shape, images: int) -> BenchRecord:
        return BenchRecord(
            part=part,
            group=group,
            name=name,
            scale=self.scale.name,
            judged=self.scale.judged,
            device=device_name(self.device),
            shape=asdict(shape),
            images=images,
            parameters=net_of(shape.backbone, model_spec(shape).preprocessing).parameters,
            versions=self.versions,
        )


def with_floor(record: BenchRecord, count: Count, rates: Rates, precision: str) -> BenchRecord:
    """Return a record with what its step computes and an estimate from below of the time that takes."""
    record = replace(record, precision=precision, flops=count.flops, bytes=count.bytes)
    if precision not in rates.flops:
        return record
    arithmetic, memory = rates.floor(count, precision)
    known = {"matrix_rate": rates.flops[precision], "copy_rate": rates.bytes}
    return replace(record, floor_arithmetic=arithmetic, floor_memory=memory, extra={**record.extra, **known})
