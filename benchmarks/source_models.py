"""What a training is worth to who adapts: models of few domains, shown the others, by ways to train.

    python benchmarks/source_models.py pacs --backbone resnet50_v1 --weights FILE --device cuda

For every choice of `--domains` domains, one model by each training, which is shown streams of every other
domain: as it is, on stream statistics, and updated by rules whose step sizes are given, not chosen; on one of
the trainings (`--grid`) by many more. For a target a training is chosen by the models and streams that have
nothing to do with it (`for_target`): those of domains that its user has. Averaged weights come with
statistics that were estimated anew, on images as they are; what of their worth is due to that shows where
statistics are those of the stream.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import combinations, product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.methods import adapt
from vicinal.benchmarks.prepare import TrainRequest, load_for, prepare_training
from vicinal.checkpoint import Trained
from vicinal.data.augment import Augment
from vicinal.data.domains import DomainSet
from vicinal.data.streams import StreamSpec, make_stream
from vicinal.evaluation.metrics import accuracy, ece, nll
from vicinal.evaluation.online import run_online
from vicinal.training.train import train
from vicinal.versions import versions

Row = dict[str, Any]
# "times": how many times --iterations it takes.
TRAININGS: dict[str, dict[str, Any]] = {
    "erm": {"algorithm": "erm"},
    "meta": {"algorithm": "meta"},
    "meta, second order": {"algorithm": "meta", "second_order": True},
    "erm, longer": {"algorithm": "erm", "times": 3},
    "erm, longer, averaged": {"algorithm": "erm", "times": 3, "average": 0.5},
    "meta, longer, averaged": {"algorithm": "meta", "times": 3, "average": 0.5},
    "meta, longer": {"algorithm": "meta", "times": 3},
}
STREAM = {"statistics": "stream"}
OWN = {"predict": "own", "doubt": None, "from_rest": False}
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "as it is": ("erm", {}),
    "no update": ("bn", STREAM),
    "soft": ("soft", {**STREAM, "lr": 3e-5}),
    "soft, horizon": ("soft", {**STREAM, "lr": 3e-5, "horizon": 1000.0}),
    "vnl": ("vnl", {**OWN, "lr": 3e-5}),
    "vnl, longer horizon": ("vnl", {**OWN, "lr": 3e-5, "horizon": 4000.0}),
}
STEPS = ((None, False), (4000.0, False), (4000.0, True), (1000.0, False), (1000.0, True))


def grid() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return further rules: steps of `soft` and `vnl`, and what else could be told them."""
    rules: dict[str, tuple[str, dict[str, Any]]] = {}
    for lr, (horizon, rest) in product((1e-5, 3e-5, 1e-4), STEPS):
        steps = {"lr": lr, "horizon": horizon, "from_rest": rest}
        name = f"{lr:g}, horizon {horizon and int(horizon)}{', rest' if rest else ''}"
        rules[f"vnl {name}"] = ("vnl", {**OWN, **steps})
        if horizon != 4000:
            rules[f"soft {name}"] = ("soft", {**STREAM, **steps})
    near = {**OWN, "lr": 3e-5, "horizon": 4000.0}
    told: dict[str, dict[str, Any]] = {
        "marginal weight 1": {"marginal_weight": 1.0},
        "marginal weight 10": {"marginal_weight": 10.0},
        "window 40": {"window": 40.0},
        "entropy alone": {"update": "entropy"},
        "two steps": {"steps": 2},
        "augment": {"augment": Augment()},
    }
    rules |= {f"vnl, {name}": ("vnl", near | options) for name, options in told.items()}
    rules["soft, augment"] = ("soft", {**STREAM, "lr": 3e-5, "augment": Augment()})
    rules["shot_im"] = ("shot_im", {**STREAM, "lr": 3e-5})
    rules["shot_im, horizon"] = ("shot_im", {**STREAM, "lr": 3e-5, "horizon": 1000.0})
    return rules


@dataclass(frozen=True)
class Job:
    """A model to train and to show what it has not seen."""

    request: TrainRequest
    training: str
    device: str
    images: int  # of each stream, at most
    rules: dict[str, tuple[str, dict[str, Any]]]
    keep: Path | None  # where predictions go


def run(job: Job) -> list[Row]:
    """Return a row for every domain that the model has not seen and every rule."""
    torch.set_num_threads(1)
    data = load_for(job.request)
    made = prepare_training(job.request, data=data)
    trained = train(made.spec, made.roles.sources, made.config, device=job.device, provenance=made.provenance)
    away = [name for name in data.domains if name not in job.request.sources]
    return [row for name in away for row in shown(trained, data, name, job)]


def shown(trained: Trained, data: DomainSet, name: str, job: Job) -> list[Row]:
    domain = data.domains[name]
    stream = make_stream(StreamSpec("online"), [domain.images], [domain.labels], job.request.seed)
    stream = replace(stream, order=stream.order[: job.images])
    labels = domain.labels[stream.order]
    rows, kept = [], {"labels": labels.numpy()}
    for rule, (method, options) in job.rules.items():
        p = run_online(adapt(trained, method, **options), stream).probabilities
        kept[rule] = p.log().half().numpy()  # near 1 a half is too coarse for p itself
        scores = {"accuracy": accuracy(p, labels), "ece": ece(p, labels), "nll": nll(p, labels)}
        facts = {"validation": trained.provenance["validation_accuracy"], "seed": job.request.seed}
        facts |= {"data": job.request.data, "backbone": trained.backbone, "images": len(labels)}
        facts |= {"size": trained.preprocessing.size, "weights": Path(job.request.weights or "").name}
        about = {"training": job.training, "sources": list(job.request.sources), "shown": name, "rule": rule}
        rows.append({**about, **facts, **scores, "iterations": trained.config["train"]["iterations"]})
    if job.keep is not None:
        job.keep.mkdir(parents=True, exist_ok=True)
        model = "-".join((job.training.replace(", ", "_"), *job.request.sources))
        np.savez_compressed(job.keep / f"{model}-on-{name}.npz", **kept)
    return rows


def for_target(rows: Iterable[Row], target: str | None) -> list[Row]:
    """Return the rows a training may be chosen by for a target: those in which it plays no part."""
    return [row for row in rows if target not in (*row["sources"], row["shown"])]


def table(rows: Sequence[Row], target: str | None = None) -> str:
    """Return means over models and streams: accuracy in %, and ECE in brackets."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in for_target(rows, target):
        groups[row["training"], row["rule"]].append(row)
    trainings = sorted({training for training, _ in groups}, key=list(TRAININGS).index)
    lines = [f"| {target or 'all'} | {' | '.join(RULES)} |", "|---|" + "---:|" * len(RULES)]
    for training in trainings:
        cells = [groups.get((training, rule), []) for rule in RULES]
        found = [
            f"{100 * mean(r['accuracy'] for r in cell):.1f} ({100 * mean(r['ece'] for r in cell):.1f})"
            if cell
            else ""
            for cell in cells
        ]
        lines.append(f"| {training} | {' | '.join(found)} |")
    return "\n".join(lines)


def grid_table(rows: Sequence[Row], target: str | None = None) -> str:
    """Return, for the training that all rules were tried on, their means, the most accurate first."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in for_target(rows, target):
        groups[row["rule"]].append(row)
    lines = [f"| {target or 'all'} | accuracy | ECE | NLL |", "|---|---:|---:|---:|"]
    for rule, found in sorted(groups.items(), key=lambda item: -mean(r["accuracy"] for r in item[1])):
        right, off = (100 * mean(r[name] for r in found) for name in ("accuracy", "ece"))
        lines.append(f"| {rule} | {right:.1f} | {off:.1f} | {mean(r['nll'] for r in found):.3f} |")
    return "\n".join(lines)


def jobs_of(args: argparse.Namespace, names: Sequence[str]) -> list[Job]:
    """Return every model to train, the longest trainings first."""
    trainings = [name for name in TRAININGS if name in (args.training or TRAININGS)]
    made = []
    for training in reversed(trainings):
        for sources in combinations(names, args.domains):
            options = {name: value for name, value in TRAININGS[training].items() if name != "times"}
            options["iterations"] = args.iterations * TRAININGS[training].get("times", 1)
            rules = RULES | grid() if training == args.grid else RULES
            request = TrainRequest(
                args.data,
                targets=tuple(name for name in names if name not in sources),
                sources=sources,
                backbone=args.backbone,
                weights=args.weights,
                size=args.size,
                seed=args.seed,
                data_dir=args.data_dir,
                training=options,
                out_of_fold=None,
            )
            made.append(Job(request, training, args.device, args.images, rules, args.keep))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="the name of a data set")
    parser.add_argument("--backbone", default=None)
    parser.add_argument("--weights", default=None)
    parser.add_argument("--size", type=int, default=None)
    parser.add_argument("--domains", type=int, default=2, help="to train on")
    parser.add_argument("--training", action="append", choices=TRAININGS, help="may be given again")
    parser.add_argument("--grid", choices=TRAININGS, help="a training on which many more rules are tried")
    parser.add_argument(
        "--iterations", type=int, default=500, help="of a training, a longer one takes thrice"
    )
    parser.add_argument("--images", type=int, default=2000, help="of each stream, at most")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for all predictions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("results/source-models"))
    args = parser.parse_args()
    request = TrainRequest(args.data, backbone=args.backbone, weights=args.weights, size=args.size)
    names = list(load_for(replace(request, data_dir=args.data_dir, seed=args.seed)).domains)
    jobs = jobs_of(args, names)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "records.jsonl"
    if path.exists():
        parser.error(f"{path} is there already: choose another --out")
    rows: list[Row] = []
    with (
        path.open("x", encoding="utf-8") as file,
        ProcessPoolExecutor(args.workers, get_context("spawn")) as pool,
    ):
        for count, done in enumerate(as_completed([pool.submit(run, job) for job in jobs]), start=1):
            rows += done.result()
            lines = [json.dumps({**row, "versions": versions()}) for row in done.result()]
            file.write("\n".join(lines) + "\n")
            file.flush()
            print(f"{count} of {len(jobs)}", end="\r", flush=True)
    for target in (None, *names):
        print(table(rows, target), end="\n\n")
        if args.grid:
            print(grid_table([row for row in rows if row["training"] == args.grid], target), end="\n\n")


if __name__ == "__main__":
    main()
