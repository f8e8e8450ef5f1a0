"""Every method on the same source models: train them once, then measure each method in a process of its own.

Step sizes are chosen where target labels cannot be seen: on streams of left-out source domains, for every
method that takes steps, over the same multiples of its own paper's value.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from vicinal.adapters.contract import METHODS
from vicinal.benchmarks.compare import Entry, compare
from vicinal.benchmarks.prepare import Prepared, TrainRequest, prepare_training, roles_for
from vicinal.checkpoint import Trained, load
from vicinal.data.streams import StreamSpec
from vicinal.errors import AdapterError
from vicinal.evaluation.record import Record, append_record, read_records
from vicinal.training.choose import choose_step_size
from vicinal.training.progress import Silent, StopRequest
from vicinal.training.train import Run, all_left_out_streams, train

# Trained for what they need at test time; every other method starts from the ERM model.
TRAINED_FOR = {
    "meta": ("vnl_paper",),
    "ttt": ("ttt",),
    "ttt_pp": ("ttt_pp",),
    "single_sample": ("single_sample",),
}
# On every source model, so that what its training is worth shows apart from the method.
REFERENCE = ("erm", "bn", "soft")
# Without these a small CPU run takes hours; the settings are in every record.
SMALLER = {"memo": {"views": 8}, "cotta": {"views": 8}}
# Multiples of a method's own step size among which left-out domains choose.
SCALES = (0.1, 1.0, 10.0)
# The dearest first, so that no process is left alone with one at the end.
DEAREST = ("cotta", "memo", "ttt_pp", "ttt", "tast", "vnl")
# They take no step, or choose their own; memo adapts to each image alone and would take hours to choose for.
FIXED = ("erm", "bn", "labels", "lame", "t3a", "vnl", "single_sample", "memo")


@dataclass(frozen=True)
class PeersConfig:
    """What is compared, on what, and where it goes."""

    data: str
    out: Path
    methods: tuple[str, ...] = ()  # empty: all
    seeds: tuple[int, ...] = (0, 1, 2)
    statistics: tuple[str, ...] = ("own", "stream")  # the method's own choice, and the stream's
    batch_size: int = 20
    workers: int = 0  # processes; 0: as many as there are cores
    device: str = "cpu"
    data_dir: Path | None = None
    data_options: dict[str, str] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    out_of_fold: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One method from one source model of one seed, on each kind of statistics."""

    algorithm: str
    seed: int
    method: str
    entries: tuple[Entry, ...]


Report = Callable[[str, int, int], None]


def run_peers(config: PeersConfig, listen: Report) -> list[Record]:
    """Return a record for every method, source model, seed and target; what is on disk is not made again."""
    path = config.out / "records.jsonl"
    algorithms = wanted_algorithms(config)
    trainings = [(algorithm, seed) for seed in config.seeds for algorithm in algorithms]
    workers = config.workers or os.cpu_count() or 1
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_one_thread) as pool:
        made = {pool.submit(_train, config, *one): one for one in trainings}
        for count, future in enumerate(_finished(pool, made), start=1):
            future.result()
            listen("train", count, len(made))
        jobs = {pool.submit(_measure, config, job): job for job in planned(config, _done(path))}
        for count, measured in enumerate(_finished(pool, jobs), start=1):
            for record in measured.result():
                append_record(path, record)
            listen("measure", count, len(jobs))
    return list(read_records(path)) if path.exists() else []


def _finished(pool: ProcessPoolExecutor, futures: "dict[Future[Any], Any]") -> "Iterator[Future[Any]]":
    try:
        yield from as_completed(futures)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def wanted_algorithms(config: PeersConfig) -> list[str]:
    """Return the ways of training that the methods need; the ERM model, with phi for `neighbor`, always."""
    names = config.methods or tuple(METHODS)
    return ["neighbor", *(name for name, methods in TRAINED_FOR.items() if set(methods) & set(names))]


def planned(config: PeersConfig, done: set[tuple[str, int, str, str]]) -> list[Job]:
    """Return what is still to be measured."""
    jobs = []
    for algorithm in wanted_algorithms(config):
        for name in methods_on(algorithm, config.methods or tuple(METHODS)):
            own = METHODS[name].defaults.statistics.kind
            # The source model on other statistics is `bn`.
            asked = ("own",) if name == "erm" else config.statistics
            kinds = dict.fromkeys(own if kind == "own" else kind for kind in asked)
            for seed in config.seeds:
                entries = tuple(
                    Entry(name, {**SMALLER.get(name, {}), "statistics": kind})
                    for kind in kinds
                    if (algorithm, seed, name, kind) not in done
                )
                jobs += [Job(algorithm, seed, name, entries)] if entries else []
    return sorted(jobs, key=lambda job: job.method not in DEAREST)


def methods_on(algorithm: str, names: Sequence[str]) -> list[str]:
    """Return the methods measured on a source model of this algorithm."""
    bound = {method for methods in TRAINED_FOR.values() for method in methods}
    if algorithm == "neighbor":
        return [name for name in names if name not in bound]
    here = (*REFERENCE, *TRAINED_FOR[algorithm], *(("vnl",) if algorithm == "meta" else ()))
    return [name for name in here if name in names]


def _done(path: Path) -> set[tuple[str, int, str, str]]:
    records = read_records(path) if path.exists() else []
    return {(r.protocol["trained_as"], r.protocol["model_seed"], r.method, r.statistics) for r in records}


def _folder(config: PeersConfig, algorithm: str, seed: int) -> Path:
    return config.out / "models" / f"{algorithm}-{seed}"


def _prepared(config: PeersConfig, algorithm: str, seed: int) -> Prepared:
    # vnl is measured on the ERM and the meta-trained model: elsewhere its rules need not be tried.
    rules = {} if algorithm in ("neighbor", "meta") else {"updates": ("none",)}
    request = TrainRequest(
        data=config.data,
        seed=seed,
        data_dir=config.data_dir,
        data_options=config.data_options,
        training={**config.training, "algorithm": algorithm},
        out_of_fold={"baselines": (), **rules, **config.out_of_fold},
    )
    return prepare_training(request)


def _train(config: PeersConfig, algorithm: str, seed: int) -> None:
    """Train one source model with its left-out models and choose the rule of vnl there."""
    folder = _folder(config, algorithm, seed)
    if (folder / "model.safetensors").exists():
        return
    ready = _prepared(config, algorithm, seed)
    train(
        ready.spec,
        ready.roles.sources,
        ready.config,
        ready.out_of_fold,
        folder=folder,
        device=config.device,
        resume=folder.exists(),
        provenance=ready.provenance,
    )


def _measure(config: PeersConfig, job: Job) -> list[Record]:
    """Choose the step size on left-out streams of the source model, then run the method on the targets."""
    folder = _folder(config, job.algorithm, job.seed)
    trained = load(folder, config.device)
    roles = roles_for(trained, data_dir=config.data_dir)
    spec = StreamSpec(batch_size=config.batch_size)
    try:
        if job.method not in FIXED:
            trained = _with_step_size(trained, config, job)
        results = list(compare(trained, roles, job.entries, spec, job.seed, dataset=config.data))
    except AdapterError:
        return []  # a method this model has nothing for
    for result in results:
        result.record.protocol["model_seed"] = job.seed
    return [result.record for result in results]


def _with_step_size(trained: Trained, config: PeersConfig, job: Job) -> Trained:
    """Return the model with the options that the left-out streams choose for a method."""
    folder = _folder(config, job.algorithm, job.seed)
    path = folder / "step_sizes" / f"{job.method}.json"
    if not path.exists():
        ready = _prepared(config, job.algorithm, job.seed)
        assert ready.out_of_fold is not None
        run = Run(folder, Silent(), StopRequest(), torch.device(config.device), resume=True)
        streams = all_left_out_streams(ready.spec, ready.roles.sources, ready.config, ready.out_of_fold, run)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(choose_step_size(streams, job.method, SCALES)), encoding="utf-8")
    methods = {**trained.choice["methods"], job.method: json.loads(path.read_text(encoding="utf-8"))}
    return replace(trained, choice={**trained.choice, "methods": methods})


def _one_thread() -> None:
    # Nets this small are bound by overhead: one core each, side by side.
    torch.set_num_threads(1)
