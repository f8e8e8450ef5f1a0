"""Where a benchmark lives: its folders, the small files beside its models, and how those are written.

What left-out domains taught for a source model is in three kinds of them, some kilobytes: phis and rule, what
was tried before they were chosen, and the step sizes of other methods. They go to other machines, and into
version control, without the models; with them no left-out model is trained again.
"""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from vicinal.benchmarks.plan import TrainRun
from vicinal.checkpoint import umask
from vicinal.errors import DataError
from vicinal.evaluation.record import finite_or_none
from vicinal.training.sureness import tempered_by

MODEL = "model.safetensors"
TAUGHT = "taught.safetensors"  # phis and rule that left-out domains taught
CHOICE = "choice.json"  # how the rules of test time did on left-out domains
STEP_SIZES = "step_sizes"  # how other methods did there
# Lines of a .gitignore: of the models only what was taught for them is for version control.
SMALL = (TAUGHT, CHOICE, f"{STEP_SIZES}/")
IGNORED = ("models/*/*", *(f"!models/*/{name}" for name in SMALL), ".*", "!.gitignore")


@dataclass(frozen=True)
class Place:
    """Where a benchmark lives."""

    out: Path
    data_dir: Path | None = None

    def model(self, key: str) -> Path:
        """Return the folder of a source model."""
        return self.out / "models" / key

    @property
    def left_out(self) -> Path:
        """The folder of the left-out models, which source models share."""
        return self.out / "models" / "left_out"


def step_sizes_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return the options that a file of choices holds, by kind of statistics."""
    found = read_json(path)
    if not all(isinstance(rows, list) for rows in found.values()):
        raise DataError(f"{path}: made by an earlier version; remove it, and it will be made anew")
    chosen = {kind: row for kind, rows in found.items() for row in rows if row["chosen"]}
    return {kind: {"lr": row["lr"], **tempered_by(row.get("temperature", 1))} for kind, row in chosen.items()}


def choices_of(run: TrainRun, place: Place) -> list[dict[str, Any]]:
    """Return what was tried on left-out streams for a source model, a row each, and what was chosen of it."""
    folder = place.model(run.key)
    files = [folder / CHOICE, *sorted((folder / STEP_SIZES).glob("*.json"))]
    return [{"model": run.key, **row} for path in files for rows in read_json(path).values() for row in rows]


def lock(path: Path) -> FileLock:
    """Return a lock that also goes with a process that is killed; two benchmarks may share a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_name(f".{path.name}.lock"))


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file holds; nothing where there is none."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no object of JSON")
    except ValueError as error:
        raise DataError(f"{path}: damaged ({error}); remove it, and it will be made anew") from None
    return found


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write JSON, all or nothing; a number that is none, or without end, becomes null."""
    write_text(path, json.dumps(finite_or_none(values), allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write a file, all or nothing, whoever else may be writing it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(handle)
    Path(name).chmod(0o666 & ~umask())  # a temporary file is its owner's alone
    Path(name).replace(path)
