"""A step size for each tensor, learned on left-out streams: is it worth more than one for all?

    python benchmarks/learned_steps.py --out results/learned-steps

Small nets trained at 30, 45 and 60 degrees and shown 15 and 75, as in benchmarks/votes.toml. Three left-out
models of two sources each are shown the third, naturally and with classes from Dirichlet 1. A method's one
step size is chosen there; from it a factor m_l for each tensor theta_l is learned there too, by the gradient
of what true labels say of the updated model: where all steps of a tensor are m_l times as long, so is, to
first order, how far it has come, and d CE(f_theta, y) / d log m_l = <grad_l CE(f_theta, y), theta_l -
theta_s,l>. The factors of the round with the lowest NLL are kept. Angles 15 and 75 play no part in any of it.
"""

import argparse
import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import adapt
from vicinal.benchmarks.prepare import TrainRequest, load_for, prepare_training
from vicinal.checkpoint import Trained
from vicinal.data.domains import DomainSet
from vicinal.data.streams import Stream, StreamSpec, make_stream
from vicinal.evaluation.metrics import accuracy, ece, nll
from vicinal.training.config import OutOfFoldConfig
from vicinal.training.left_out import Fold, LeftOutStream, left_out_streams
from vicinal.training.train import train
from vicinal.versions import versions

Row = dict[str, Any]
Factors = dict[str, float]
DATA: dict[str, dict[str, str]] = {
    "digits": {},
    "rotated_fashion": {"train": "4000", "val": "500", "test": "2000"},
}
SOURCES, SHOWN = ("30", "45", "60"), ("15", "75")
STEPS = {"horizon": 1000.0, "from_rest": True}
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "soft": ("soft", {"statistics": "stream", **STEPS}),
    "vnl": ("vnl", {"predict": "own", **STEPS}),
}
SIZES = (3e-4, 1e-3, 2e-3)
ROUNDS, RATE, FARTHEST = 12, 0.25, 30.0  # of learning; how far a factor goes in one; how far it may go
LESSONS = OutOfFoldConfig(leave_out=1, stream_images=500, marginals=(1.0,))
STREAMS = {"natural": StreamSpec(), "Dirichlet 0.5": StreamSpec("label_shift", alpha=0.5)}


@dataclass(frozen=True)
class Job:
    """A data set, a way of training and a seed."""

    data: str
    algorithm: str
    seed: int
    iterations: int
    rounds: int


def built(trained: Trained, rule: str, lr: float, factors: Factors) -> Adapter:
    """Return a method with a step size of its own for each tensor."""
    method, options = RULES[rule]
    adapter = adapt(trained, method, lr=lr, **options)
    parts = [
        {"params": [value], "lr": lr * factors.get(name, 1.0)}
        for name, value in adapter.model.named_parameters()
        if value.requires_grad
    ]
    adapter.optimizer = torch.optim.Adam(parts)
    return adapter


def gradient(adapter: Adapter, home: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, float]:
    """Return d CE / d log m_l of the updated model on its batch, by tensor."""
    moved = dict(adapter.model.named_parameters())
    with torch.enable_grad(), adapter.norm.updating(len(x)):
        loss = F.cross_entropy(adapter.model.features_and_logits(x)[1], y)
        v = torch.autograd.grad(loss, list(moved.values()))
    return {
        name: float((slope * (value.detach() - home[name])).sum())
        for (name, value), slope in zip(moved.items(), v, strict=True)
    }


def predicted(adapter: Adapter, stream: Stream) -> Tensor:
    return torch.cat([adapter(x).softmax(-1) for x in stream.batches("cpu")])


def played(
    streams: Sequence[LeftOutStream], rule: str, lr: float, factors: Factors
) -> tuple[dict[str, float], float, float]:
    """Return mean gradients, NLL and accuracy over left-out streams."""
    sums: dict[str, float] = {}
    scores = []
    for one in streams:
        adapter = built(one.trained, rule, lr, factors)
        home = {name: value.detach().clone() for name, value in adapter.model.named_parameters()}
        found, start = [], 0
        for x in one.stream.batches("cpu"):
            found.append(adapter(x).softmax(-1))
            y = one.labels[start : start + len(x)]
            start += len(x)
            for name, value in gradient(adapter, home, x, y).items():
                sums[name] = sums.get(name, 0.0) + value / (len(one.stream) * len(streams))
        p = torch.cat(found)
        scores.append((nll(p, one.labels), accuracy(p, one.labels)))
    return sums, mean(s[0] for s in scores), mean(s[1] for s in scores)


def learned(streams: Sequence[LeftOutStream], rule: str, lr: float, rounds: int) -> tuple[Factors, list[Row]]:
    """Return the factors of the round with the lowest NLL, and how all rounds did."""
    logs: dict[str, float] = {}
    course: list[Row] = []
    for _ in range(rounds + 1):
        factors = {name: math.exp(value) for name, value in logs.items()}
        slopes, loss, right = played(streams, rule, lr, factors)
        course.append({"factors": factors, "nll": loss, "accuracy": right})
        scale = math.sqrt(mean(value**2 for value in slopes.values())) or 1.0
        farthest = math.log(FARTHEST)
        for name, value in slopes.items():
            step = max(-1.0, min(1.0, value / scale))
            logs[name] = max(-farthest, min(farthest, logs.get(name, 0.0) - RATE * step))
    best = min(course, key=lambda row: row["nll"])
    return best["factors"], course


def trained_on(request: TrainRequest, data: DomainSet, sources: tuple[str, ...]) -> tuple[Trained, Any]:
    made = prepare_training(replace(request, sources=sources, targets=SHOWN), data=data)
    return train(made.spec, made.roles.sources, made.config), made.roles


def run(job: Job) -> list[Row]:
    """Return a row for every rule, way to step, angle and kind of stream."""
    torch.set_num_threads(1)
    request = TrainRequest(
        job.data,
        backbone="small",
        seed=job.seed,
        data_options=DATA[job.data],
        training={"algorithm": job.algorithm, "iterations": job.iterations},
        out_of_fold=None,
    )
    data = load_for(request)
    whole, roles = trained_on(request, data, SOURCES)
    every = {source.name: source for source in roles.sources}
    folds = [
        Fold(trained_on(request, data, tuple(n for n in SOURCES if n != name))[0], (every[name],))
        for name in SOURCES
    ]
    lessons = left_out_streams(folds, LESSONS, job.seed)
    rows = []
    for rule in RULES:
        tried = {lr: played(lessons, rule, lr, {})[1:] for lr in SIZES}
        lr = max(tried, key=lambda size: tried[size][1])
        factors, course = learned(lessons, rule, lr, job.rounds)
        facts = {"data": job.data, "algorithm": job.algorithm, "seed": job.seed, "rule": rule, "lr": lr}
        facts |= {"iterations": job.iterations, "left_out": {"one": tried[lr], "learned": course}}
        for (steps, given), shown, kind in product((("one", {}), ("learned", factors)), SHOWN, STREAMS):
            domain = data.domains[shown]
            stream = make_stream(STREAMS[kind], [domain.images], [domain.labels], job.seed)
            p, y = predicted(built(whole, rule, lr, given), stream), domain.labels[stream.order]
            scores = {"accuracy": accuracy(p, y), "ece": ece(p, y), "nll": nll(p, y), "images": len(y)}
            rows.append({**facts, "steps": steps, "shown": shown, "stream": kind, **scores})
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return accuracy (ECE) in percent by data set, training and rule, with one step size and with many."""
    lines = [
        "| data, training, rule | left out | " + " | ".join(STREAMS) + " |",
        "|---|---|" + "---|" * len(STREAMS),
    ]
    for data, algorithm, rule in product(DATA, ("erm", "meta"), RULES):
        mine = [r for r in rows if (r["data"], r["algorithm"], r["rule"]) == (data, algorithm, rule)]
        if not mine:
            continue
        first = [
            r for r in mine if r["steps"] == "one" and r["shown"] == SHOWN[0] and r["stream"] == "natural"
        ]
        before = 100 * mean(r["left_out"]["learned"][0]["accuracy"] for r in first)
        after = 100 * mean(min(r["left_out"]["learned"], key=lambda c: c["nll"])["accuracy"] for r in first)
        cells = [f"{before:.1f} -> {after:.1f}"]
        for kind in STREAMS:
            ways = [[r for r in mine if (r["stream"], r["steps"]) == (kind, s)] for s in ("one", "learned")]
            figures = [
                f"{100 * mean(r['accuracy'] for r in w):.1f} ({100 * mean(r['ece'] for r in w):.1f})"
                for w in ways
            ]
            cells.append(" -> ".join(figures))
        lines.append(f"| {data}, {algorithm}, `{rule}`, {len(first)} seeds | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/learned-steps"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "steps.jsonl"
    if path.exists():
        parser.error(f"{path} is there already: choose another --out")
    jobs = [
        Job(data, algorithm, seed, args.iterations, args.rounds)
        for data, seed, algorithm in product(args.data, range(args.seeds), ("erm", "meta"))
    ]
    rows: list[Row] = []
    with (
        path.open("x", encoding="utf-8") as file,
        ProcessPoolExecutor(args.workers, get_context("spawn")) as pool,
    ):
        for count, done in enumerate(as_completed([pool.submit(run, job) for job in jobs]), start=1):
            rows += done.result()
            file.writelines(json.dumps({**row, "versions": versions()}) + "\n" for row in done.result())
            file.flush()
            print(f"{count} of {len(jobs)}", end="\r", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
