"""Running a plan: jobs side by side, each as soon as what it needs is there; what is done is not done again.

Whatever ends a run, also `kill -9`, the same call goes on: models and records are on disk whole or not at
all, a training goes on from its last saved state, and equal keys give equal numbers.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from vicinal.benchmarks.place import IGNORED, Place, choices_of, lock, write_text
from vicinal.benchmarks.plan import MeasureRun, Plan
from vicinal.benchmarks.schedule import Failure, Job, Listen, Shift, make_tasks
from vicinal.benchmarks.store import Store, benchmark_of, in_cell
from vicinal.benchmarks.workers import Crew, Desk
from vicinal.data.catalog import DATASETS
from vicinal.data.find import data_dirs, how_to_get, status
from vicinal.errors import DataError
from vicinal.evaluation.record import Record

INDEX = "models.json"
CHOICES = "choices.jsonl"


@dataclass(frozen=True)
class Missing:
    """A data set that is not here, and what to do about it."""

    data: str
    how: str


def missing_data(plan: Plan, data_dir: Path | None = None) -> list[Missing]:
    """Return the data sets of a plan that are not found; looks for them, reads none."""
    dirs = data_dirs(data_dir)
    names = dict.fromkeys(run.request.data for run in plan.trainings)
    entries = [DATASETS[name] for name in names if name in DATASETS]
    absent = [entry for entry in entries if status(entry, dirs).state == "missing"]
    own = [name for name in names if name not in DATASETS and not Path(name).exists()]
    return [
        *(Missing(entry.name, how_to_get(entry, dirs[0])) for entry in absent),
        *(Missing(name, f"no such folder or table from here, '{Path.cwd()}'") for name in own),
    ]


def without_data(plan: Plan, missing: Sequence[Missing]) -> Plan:
    """Return the runs whose data are here."""
    gone = {item.data for item in missing}
    trainings = tuple(run for run in plan.trainings if run.request.data not in gone)
    keys = {run.key for run in trainings}
    return Plan(trainings, tuple(run for run in plan.measures if run.model in keys))


def devices_for(device: str, workers: int) -> list[str]:
    """Return the device of every worker: GPUs in turn. 0 workers: one for each GPU, or for each core."""
    if device == "cpu":
        return ["cpu"] * (workers or os.cpu_count() or 1)
    count = max(1, torch.cuda.device_count())
    return [f"cuda:{number % count}" for number in range(workers or count)]


def run_plan(
    plan: Plan, place: Place, devices: Sequence[str], listen: Listen, *, start: str = "spawn"
) -> list[Failure]:
    """Train and measure what is not on disk yet; return what could not be done."""
    return run_plans([(plan, place)], devices, listen, start=start)


def run_plans(
    parts: Sequence[tuple[Plan, Place]],
    devices: Sequence[str],
    listen: Listen,
    *,
    teach: bool = False,
    start: str = "spawn",
) -> list[Failure]:
    """Do what several plans, each in its place, have left to do, by the same workers.

    With `teach` they choose on left-out domains and do nothing else. `start` is how processes begin: "spawn",
    or "fork" where nothing but the CPU is used.
    """
    tasks = []
    for plan, place in parts:
        write_index(plan, place.out)
        write_choices(plan, place)  # a damaged file is said now, not after hours of work
        tasks += make_tasks(plan, place, Store(place.out).done(), teach=teach)
    try:
        if not tasks:
            return []
        with _terminated_like_interrupted(), Crew(_work, devices[: len(tasks)], start) as crew:
            return Shift(crew, tasks, listen).run()
    finally:
        for plan, place in parts:
            write_choices(plan, place)


def _work(job: Job, desk: Desk) -> None:
    job(desk)


def records_of(plan: Plan, store: Store) -> list[Record]:
    """Return the records of a plan, each for every cell of the table that its run stands in."""
    cells: dict[str, list[MeasureRun]] = {}
    for run in plan.measures:
        cells.setdefault(run.key, []).append(run)
    return [
        in_cell(record, run.spec, run.row, run.setting)
        for record in store.records()
        for run in cells.get(benchmark_of(record)["key"], [])
        if record.target in run.results
    ]


def write_index(plan: Plan, out: Path) -> None:
    """Write which key is which model, beside those of earlier plans, and what is not for version control."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / INDEX
    found = {
        run.key: {
            "algorithm": run.algorithm,
            "seed": run.seed,
            "data": run.request.data,
            "targets": list(run.request.targets),
            "backbone": run.about["backbone"],
        }
        for run in plan.trainings
    }
    with lock(path):
        index = {**_index_before(path), **found}
        write_text(path, json.dumps(index, indent=1, sort_keys=True) + "\n")
    (out / ".gitignore").write_text("".join(f"{line}\n" for line in IGNORED), encoding="utf-8")


def _index_before(path: Path) -> dict[str, Any]:
    """Return what an index says already."""
    if not path.exists():
        return {}
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: damaged ({error}); remove it, and it will be made anew") from None
    if not isinstance(index, dict):
        raise DataError(f"{path}: damaged (no table of models); remove it, and it will be made anew")
    return index


def write_choices(plan: Plan, place: Place) -> None:
    """Write what was tried before anything was chosen, a line each, beside what earlier plans tried."""
    path = place.out / CHOICES
    found = {run.key: rows for run in plan.trainings if (rows := choices_of(run, place))}
    if not found:
        return
    with lock(path):
        rows = [row for row in _tried_before(path) if row["model"] not in found]
        rows += [row for key in sorted(found) for row in found[key]]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _tried_before(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of choices."""
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise DataError(f"{path}: damaged ({error}); remove it, and it will be made anew") from None


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Treat a request to terminate as Ctrl-C: either way the workers go too."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted: the same command goes on from here") from None
    finally:
        signal.signal(signal.SIGTERM, before)
