"""What records of `vicinal bench` were made by: machine, libraries and code, and the command."""

from collections.abc import Sequence
from pathlib import Path

from vicinal.benchmarks.bench.records import PARTS, SECTIONS, BenchRecord
from vicinal.benchmarks.bench.scale import SCALES

LIBRARIES = {"torch": "torch", "cuda": "CUDA", "cudnn": "cuDNN", "driver": "driver"}
SHORT_COMMIT = 12  # digits of one


def origin(record: BenchRecord) -> str:
    """Return the device, the libraries and the code of a record, in words."""
    told = record.versions
    libraries = [f"{word} {told[name]}" for name, word in LIBRARIES.items() if name in told]
    return ", ".join([record.device, *libraries, _commit(told)])


def _commit(told: dict[str, str]) -> str:
    if "commit" not in told:
        return "commit unknown"
    changed = " with uncommitted changes" if told.get("changes") == "uncommitted" else ""
    by = f" by {told['commit_by']}" if "commit_by" in told else ""
    return f"commit {told['commit'][:SHORT_COMMIT]}{by}{changed}"


def origin_lines(records: Sequence[BenchRecord]) -> list[str]:
    """Return what made the records; a line for each, with what it made, where that is more than one thing."""
    made: dict[str, list[str]] = {}
    for record in records:
        what = record.group if record.part == "goals" else record.part
        groups = made.setdefault(origin(record), [])
        if what not in groups:
            groups.append(what)
    if len(made) == 1:
        return [f"{text}." for text in made]
    return [
        "These records were not all made by the same:",
        *(f"- {text}: {', '.join(groups)}." for text, groups in made.items()),
    ]


def parts_of(records: Sequence[BenchRecord]) -> list[str]:
    """Return the parts, or sections of the goals, that records are of; nothing where that is everything."""
    scale = SCALES.get(records[0].scale)
    sections = [name for name in SECTIONS if scale is None or scale.measures(name)]
    held = {record.group for record in records if record.part == "goals"}
    goals = ["goals"] if held.issuperset(sections) else [name for name in SECTIONS if name in held]
    parts = {record.part for record in records}
    found = [*goals, *(part for part in PARTS if part != "goals" and part in parts)]
    return [] if found == list(PARTS) else found


def command_of(records: Sequence[BenchRecord], folder: Path) -> str:
    """Return the command that measures the same again."""
    device = "cpu" if records[0].device.startswith("CPU") else "cuda"
    quick = " --quick" if records[0].scale == "quick" else ""
    only = "".join(f" --only {name}" for name in parts_of(records))
    return f"vicinal bench --device {device}{quick}{only} --out {folder}"
