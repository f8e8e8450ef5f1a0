"""Runs a benchmark in a process group of its own and kills the group: python kill_run.py < job.json.

A job: {"spec": path, "only": [...], "seeds": n, "folders": root, "kills": n, "seed": n, "share": of a whole
run's time before which each kill falls}. Everything is imported once and each run is forked, so that a run
takes no longer than its work.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import sklearn.datasets  # noqa: F401  by the first run that needs it otherwise
import torchmetrics.functional.classification  # noqa: F401  likewise

from vicinal.benchmarks.place import Place
from vicinal.benchmarks.plan import plan
from vicinal.benchmarks.run import run_plan
from vicinal.benchmarks.spec import load_spec


def begin(job: dict[str, Any], out: Path, workers: int) -> int:
    """Start a run in a new process group; return its number."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    code = 3
    try:
        runs = plan(load_spec(Path(job["spec"])), only=job["only"], seeds=job["seeds"])
        failures = run_plan(runs, Place(out), ["cpu"] * workers, lambda *step: None, start="fork")
        print(failures, file=sys.stderr)
        code = 1 if failures else 0
    finally:
        os._exit(code)


def ended(pid: int, seconds: float) -> int | None:
    """Return the exit code of a run that ended within so many seconds; else None."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def standing(out: Path) -> tuple[int, int, int]:
    """Return how far a killed run had come: files of trainings, models, lines of records."""
    states = list(out.glob("models/*/**/state-*"))
    models = list(out.glob("models/*/model.safetensors"))
    records = out / "records.jsonl"
    return len(states), len(models), records.read_bytes().count(b"\n") if records.exists() else 0


def main() -> None:
    job = json.load(sys.stdin)
    root, rng = Path(job["folders"]), random.Random(job["seed"])
    started = time.monotonic()
    codes = [ended(begin(job, root / "whole", 1), 600)]
    whole = time.monotonic() - started
    kills, folder, found = 0, 0, []
    while kills < job["kills"]:
        pid = begin(job, root / f"killed-{folder}", 2)
        code = ended(pid, rng.uniform(0, job["share"] * whole))
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            kills += 1
            found.append(standing(root / f"killed-{folder}"))
        else:  # done before the blow: the next ones fall on a benchmark of their own
            codes.append(code)
            folder += 1
    codes.append(ended(begin(job, root / f"killed-{folder}", 2), 600))
    outcome = {"codes": codes, "kills": kills, "folders": folder + 1, "found": found, "seconds": whole}
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
