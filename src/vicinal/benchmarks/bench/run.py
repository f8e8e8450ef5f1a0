"""A whole run: the goals' cases, profiles and growth, each record handed over as soon as it is there."""

import gc
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from vicinal.benchmarks.bench.measure import Measurement, measure
from vicinal.benchmarks.bench.profiling import profiled
from vicinal.benchmarks.bench.records import BenchRecord, asked
from vicinal.benchmarks.bench.scale import FULL, Scale, Shape
from vicinal.benchmarks.bench.timing import PeakMemory, reason, release
from vicinal.benchmarks.estimate import net_of
from vicinal.training.left_out import folds
from vicinal.versions import versions

LEAST_ITERATIONS = 20  # of a loop whose rate is wanted: it speaks every ten
Found = tuple[float, dict[str, Any]]  # seconds, and what else is worth a record


def device_name(device: torch.device) -> str:
    """Return what a record calls the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


@dataclass(frozen=True, eq=False)
class Bench:
    """A run on one device: its size, and who takes the records and hears what is going on."""

    scale: Scale
    device: torch.device
    keep: Callable[[BenchRecord], None]
    say: Callable[[str], None]

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
            self._once("goals", "loop", goals.LOOP, self.scale.shape, self._loop)
        if not asked("goals", "stream", parts):
            return
        for name, update in ((goals.STREAM, "marginal"), (goals.STREAM_FREE, "entropy")):
            self._once("goals", "stream", name, self.scale.shape, partial(self._stream, update))

    def _loop(self) -> Found:
        marks = loop_marks(self.scale, self.scale.shape, self.device, self.scale.iterations)
        seconds = extrapolated(marks, goals.ITERATIONS)
        each = f"{1e3 * seconds / goals.ITERATIONS:.3g} ms each with drawing, augmentation and validation"
        note = f"extrapolated from {self.scale.iterations}, {each}"
        return seconds, {"note": note, "marks": marks}

    def _stream(self, update: str) -> Found:
        run, all_images = sum(self.scale.streams), sum(FULL.streams)
        seconds = stream_seconds("vnl", self.scale, self.device, update=update) * all_images / run
        said = "" if run == all_images else f"extrapolated from {run} images, "
        note = f"{said}an adapter for each target domain, its set-up included"
        return seconds, {"note": note}

    def _profiles(self) -> None:
        for case in profiled_cases(self.scale, self.device):
            self.say(f"profile: {case.name}")
            record = self._record("profile", "profile", case.name, case.shape, case.images)
            try:
                record = replace(record, extra=asdict(profiled(case.build(), self.device)))
            except Exception as error:  # the next case may well be profiled
                record = replace(record, error=reason(error))
            release(self.device)
            self.keep(record)

    def _growth(self) -> None:
        for axis in self.scale.growth:
            shapes = growing_shapes(self.scale, axis)
            if axis != "domains":
                for subject in GROWING:
                    cases = growing_cases(subject, shapes, self.device)
                    self._measure("growth", f"{axis}: {subject}", cases, self.scale.growth_rounds)
                continue
            # Domains change what is drawn, not a step: the whole loop is timed.
            for value, shape in shapes.items():
                work = partial(self._iteration, shape)
                self._once("growth", "domains: iteration of the loop", value, shape, work)

    def _iteration(self, shape: Shape) -> Found:
        iterations = max(LEAST_ITERATIONS, self.scale.iterations // 5)
        (first, begun), *_, (last, ended) = loop_marks(self.scale, shape, self.device, iterations)
        return (ended - begun) / (last - first), {"left_out_models": len(folds(shape.domains, 0))}

    def _measure(
        self, part: str, group: str, cases: Sequence[Case], rounds: int, rates: Rates | None = None
    ) -> None:
        self.say(f"{part}: {group}")
        for one in measure(cases, self.device, rounds, self.scale.round_seconds, count=rates is not None):
            record = self._measured(part, group, one)
            if one.count is not None and rates is not None:
                record = with_floor(record, one.count, rates, precision_of(one.count, self.device))
            self.keep(record)

    def _measured(self, part: str, group: str, one: Measurement) -> BenchRecord:
        return replace(
            self._record(part, group, one.case.name, one.case.shape, one.case.images),
            rounds=one.timed.rounds,
            repeats=one.timed.repeats,
            error=one.timed.error,
            peak_bytes=one.peak_bytes,
        )

    def _once(self, part: str, group: str, name: str, shape: Shape, work: Callable[[], Found]) -> None:
        """Keep the record of something too long to repeat."""
        self.say(f"{part}: {group}, {name}")
        record, memory = self._record(part, group, name, shape, 2 * shape.batch), PeakMemory(self.device)
        try:
            with memory:
                seconds, extra = work()
            record = replace(record, rounds=(seconds,), repeats=1, extra=extra, peak_bytes=memory.bytes)
        except Exception as error:  # a row that says why
            record = replace(record, error=reason(error))
        self.keep(record)

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
            versions=versions(),
        )


def with_floor(record: BenchRecord, count: Count, rates: Rates, precision: str) -> BenchRecord:
    """Return a record with what its step computes and the least time that takes."""
    record = replace(record, precision=precision, flops=count.flops, bytes=count.bytes)
    if precision not in rates.flops:
        return record
    arithmetic, memory = rates.floor(count, precision)
    known = {"matrix_rate": rates.flops[precision], "copy_rate": rates.bytes}
    return replace(record, floor_arithmetic=arithmetic, floor_memory=memory, extra=known)
