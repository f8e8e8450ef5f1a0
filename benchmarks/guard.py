"""What the guard is worth where methods collapse, and what it costs where they are well.

    vicinal compare digits --out comparison
    python benchmarks/guard.py comparison --out results/guard

Takes the source models of a comparison. Every method runs with and without the guard over

- healthy streams: the targets in random order, at the step size chosen on left-out domains;
- a stream built to collapse: sorted by class, ten times that step size, 30 batches of noise in the middle.

Accuracy is that on the real images. `--light 0.25` shows all of them in a quarter of the light, where the
source itself may fail. `--left-out` runs the same on left-out source domains, which is where the guard's
limits were chosen, and never on the targets.
"""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.contract import Adapter
from vicinal.adapters.guard import Guarded
from vicinal.adapters.methods import METHODS, adapt
from vicinal.benchmarks.peers import TRAINED_FOR
from vicinal.benchmarks.place import step_sizes_in
from vicinal.benchmarks.plan import FIXED
from vicinal.benchmarks.prepare import roles_for
from vicinal.checkpoint import Trained, load
from vicinal.data.load import load_dataset
from vicinal.data.streams import StreamSpec, make_stream
from vicinal.errors import AdapterError
from vicinal.versions import made_by

BATCH = 20
NOISE = 30
LEFT_OUT = 700  # images of a left-out domain
HIGH = 10.0  # times the step size that was chosen
FEWER_VIEWS = {"memo": {"views": 8}, "cotta": {"views": 8}}
Batches = list[tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Job:
    """A method on one source model."""

    method: str
    folder: Path
    seed: int
    left_out: bool
    light: float = 1.0


def source_of(method: str) -> str:
    """Return the algorithm whose model a method starts from."""
    return next((name for name, methods in TRAINED_FOR.items() if method in methods), "neighbor")


def models_of(comparison: Path, algorithm: str) -> list[tuple[int, Path]]:
    """Return seed and folder of the source models that were trained by an algorithm."""
    index = json.loads((comparison / "models.json").read_text(encoding="utf-8"))
    mine = [(facts["seed"], key) for key, facts in index.items() if facts["algorithm"] == algorithm]
    return [(seed, comparison / "models" / key) for seed, key in sorted(mine)]


def trials(job: Job) -> Iterator[tuple[Trained, str, Tensor, Tensor]]:
    """Yield models with domains that they never saw: name, images and labels."""
    trained = load(job.folder)
    if not job.left_out:
        roles = roles_for(trained)
        for target in roles.targets:
            whole = torch.arange(len(target.images))
            yield trained, target.name, target.images[whole], roles.answers[target.name]
        return
    data = load_dataset(trained.provenance["dataset"], seed=trained.provenance["data_seed"])
    # Those of all seeds lie together, and one job goes through them.
    for fold in sorted((job.folder.parent / "left_out").glob("on-*")):
        seen = load(fold)
        if seen.algorithm != trained.algorithm:
            continue
        away = [n for n in trained.provenance["sources"] if n not in seen.provenance["sources"]]
        seen = replace(
            seen, choice=trained.choice, anchor_phi=trained.anchor_phi, predict_phi=trained.predict_phi
        )
        for name in away:
            domain = data.domains[name]
            some = torch.randperm(len(domain.images), generator=torch.Generator().manual_seed(job.seed))[
                :LEFT_OUT
            ]
            yield seen, f"{fold.name}/{name}", domain.images[some], domain.labels[some]


def batches(images: Tensor, labels: Tensor, collapse: bool, job: Job) -> Batches:
    """Return the stream with its labels; batches of noise have none."""
    stream = make_stream(
        StreamSpec("class_sorted" if collapse else "online", BATCH), [images], [labels], job.seed
    )
    found: Batches = []
    for index, x in enumerate(stream.batches("cpu")):
        found.append((job.light * x, labels[stream.order[index * BATCH : index * BATCH + len(x)]]))
    if collapse:
        generator = torch.Generator().manual_seed(job.seed)
        noise = [torch.rand(BATCH, *images.shape[1:], generator=generator) for _ in range(NOISE)]
        half = len(found) // 2
        found[half:half] = [(x, None) for x in noise]
    return found


def accuracy(classify: nn.Module, stream: Batches) -> float:
    right = images = 0
    for x, y in stream:
        found = classify(x).argmax(-1)
        if y is not None:
            right += int((found == y).sum())
            images += len(y)
    return 100 * right / images


def run(job: Job) -> list[dict[str, Any]]:
    """Return one row for every domain, kind of statistics and stream."""
    torch.set_num_threads(1)
    rows = []
    for trained, domain, images, labels in trials(job):
        options = with_step_sizes(trained, job)
        for collapse in (False, True):
            stream = batches(images, labels, collapse, job)
            erm = accuracy(adapt(trained, "erm"), stream)
            for kind in dict.fromkeys((METHODS[job.method].defaults.statistics.kind, "stream")):
                told = {**FEWER_VIEWS.get(job.method, {}), "statistics": kind, "seed": job.seed}
                try:
                    adapter = made(trained, job.method, {**told, **options.get(kind, {})}, collapse)
                except AdapterError:
                    continue  # the left-out models have no part that the method needs
                row = {
                    "method": job.method,
                    "statistics": kind,
                    "seed": job.seed,
                    "domain": domain,
                    "light": job.light,
                    "erm": erm,
                }
                rows.append(
                    {**row, "stream": "collapse" if collapse else "healthy", **outcome(adapter, stream)}
                )
    return rows


def made(trained: Trained, method: str, options: dict[str, Any], collapse: bool) -> Adapter:
    adapter = adapt(trained, method, **options)
    return adapt(trained, method, **{**options, "lr": HIGH * adapter.settings.lr}) if collapse else adapter


def outcome(adapter: Adapter, stream: Batches) -> dict[str, Any]:
    """Return the accuracy without and with the guard, its alarms, and how often it asked the source."""
    plain = accuracy(adapter, stream)
    adapter.reset()
    guarded, passes = Guarded(adapter), []
    guarded.reference.model.register_forward_hook(lambda *_: passes.append(1))
    found = accuracy(guarded, stream)
    return {
        "lr": adapter.settings.lr,
        "plain": plain,
        "guarded": found,
        "alarms": len(guarded.events),
        "source_passes": len(passes) / len(stream),  # a batch
    }


def with_step_sizes(trained: Trained, job: Job) -> dict[str, dict[str, Any]]:
    """Return what the comparison chose for the method, by kind of statistics."""
    path = job.folder / "step_sizes" / f"{job.method}.json"
    return {} if job.method in FIXED else step_sizes_in(path)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return means over domains and seeds, one line for every method, kind of statistics and stream."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["stream"], row["method"], row["statistics"]].append(row)
    lines = [
        "| stream | method | statistics | erm | without | with guard | less erm | less without | alarms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, group in sorted(groups.items()):
        erm, plain, guarded, alarms = (
            mean(row[name] for row in group) for name in ("erm", "plain", "guarded", "alarms")
        )
        gains = f"{guarded - erm:+.1f} | {guarded - plain:+.2f}"
        figures = f"{erm:.1f} | {plain:.1f} | {guarded:.1f} | {gains} | {alarms:.1f}"
        lines.append(f"| {' | '.join(key)} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparison", type=Path, help="the --out of `vicinal compare`")
    parser.add_argument("--methods", default="all")
    parser.add_argument("--left-out", action="store_true")
    parser.add_argument("--light", type=float, default=1.0, help="what pixels are multiplied by")
    parser.add_argument("--seeds", type=int, default=None, help="so many of the comparison's; default: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("results/guard"))
    args = parser.parse_args()
    methods = list(METHODS) if args.methods == "all" else args.methods.split(",")
    jobs = [
        Job(method, folder, seed, args.left_out, args.light)
        for method in methods
        for seed, folder in models_of(args.comparison, source_of(method))[
            : 1 if args.left_out else args.seeds
        ]
    ]
    rows: list[dict[str, Any]] = []
    name = "left_out" if args.left_out else "targets"
    args.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        for count, found in enumerate(pool.map(run, jobs), start=1):
            rows += found
            print(f"{count} of {len(jobs)}", end="\r", flush=True)
            lines = [json.dumps({**row, "versions": made_by()}) for row in rows]
            (args.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
