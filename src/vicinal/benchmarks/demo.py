"""The demo: train on rotated digits, compare every method over seeds, in minutes on two CPU cores.

A task is one source model of one seed. Tasks run side by side, each in a process with one thread, since nets
this small are bound by overhead, not by arithmetic.
"""

import multiprocessing
import os
import queue
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from vicinal.benchmarks.compare import Entry, Result, compare
from vicinal.checkpoint import Trained
from vicinal.data.catalog import DATASETS
from vicinal.data.domains import Roles, assign_roles
from vicinal.data.load import load_dataset
from vicinal.data.streams import StreamSpec
from vicinal.evaluation.example import Example
from vicinal.evaluation.record import Record
from vicinal.models.backbones import preprocessing_for
from vicinal.training.config import OutOfFoldConfig, TrainConfig
from vicinal.training.progress import Relay
from vicinal.training.train import ModelSpec, train

BASELINES = ("hard", "soft", "probabilistic")
HINDSIGHT = (*BASELINES, "neighbor", "vnl_paper")
# Baselines run at each of these and the best in hindsight is shown, a favour that vnl does not get.
STEP_SIZES = (3e-4, 1e-3)
MORE_STEP_SIZES = (1e-4, *STEP_SIZES, 2e-3)
EXAMPLES = 12
DRAWS = 5
SHIFTED = StreamSpec("label_shift", alpha=0.5)


@dataclass(frozen=True)
class DemoConfig:
    """How large the demo is."""

    seeds: tuple[int, ...] = (0, 1, 2)
    iterations: int = 200
    step_sizes: tuple[float, ...] = STEP_SIZES
    stream_images: int = 400
    epochs: int = 50
    device: str = "cpu"


@dataclass(frozen=True)
class Task:
    """One source model of one seed and all that is measured on it."""

    algorithm: str
    seed: int
    config: DemoConfig
    fitted: dict[str, Any] | None = None  # phis and rule; without them the task fits and chooses its own


@dataclass(frozen=True, eq=False)
class TaskResult:
    """What a task brings home."""

    task: Task
    records: list[Record]
    fitted: dict[str, Any] | None = None
    examples: list[Example] = field(default_factory=list)


Report = Callable[[str, str, int, int], None]  # task, stage, done, total


def entries(algorithm: str, step_sizes: Sequence[float] = STEP_SIZES) -> list[Entry]:
    """Return what is measured on a source model of this algorithm."""
    made = [Entry("erm"), Entry("bn"), Entry("bn", {"statistics": "stream"})]
    for method, statistics, lr in product(BASELINES, ("batch", "stream"), step_sizes):
        made.append(Entry(method, {"statistics": statistics, "lr": lr}))
    own = "neighbor" if algorithm == "neighbor" else "vnl_paper"
    made += [Entry(own, {"lr": lr}) for lr in step_sizes] + [Entry(own, {"predict": "labels"})]
    return [*made, Entry("labels"), Entry("vnl")]


def run_task(task: Task, send: Report) -> TaskResult:
    """Train one source model of one seed and measure every entry on both targets."""
    data = load_dataset("digits", seed=task.seed)
    roles = assign_roles(data, DATASETS["digits"].default_targets)
    name = f"{task.algorithm}, seed {task.seed}"
    trained = _train(task, roles, Relay(partial(send, name)))
    if task.fitted is not None:
        # phi sees no features, only a few scale-free numbers a class, and never saw the model it serves: the
        # one fitted on left-out ERM models, and the rule chosen with them, serve the meta-trained model too;
        # so does what ERM models doubted, though a meta-trained one may doubt more or less.
        trained = replace(trained, **task.fitted)
    wanted = entries(task.algorithm, task.config.step_sizes)
    total, results = len(wanted) * len(roles.targets), []
    for result in compare(trained, roles, wanted, StreamSpec(), task.seed, dataset="digits"):
        results.append(result)
        send(name, "evaluate", len(results), total)
    records = [result.record for result in results]
    if task.fitted is not None:
        return TaskResult(task, records)
    records += _label_shifted(trained, roles, task.seed)
    fitted = {part: getattr(trained, part) for part in ("anchor_phi", "predict_phi", "choice")}
    return TaskResult(task, records, fitted, _examples(results, roles.answers, roles.classes))


def _train(task: Task, roles: Roles, relay: Relay) -> Trained:
    config = task.config
    spec = ModelSpec("small", "none", preprocessing_for("small", channels=1), roles.classes)
    left_out = OutOfFoldConfig(
        stream_images=config.stream_images, epochs=config.epochs, step_sizes=(1e-3, 2e-3), baselines=()
    )
    return train(
        spec,
        roles.sources,
        TrainConfig(algorithm=task.algorithm, iterations=config.iterations, seed=task.seed),
        left_out if task.fitted is None else None,
        device=config.device,
        progress=relay,
        provenance={"dataset": "digits", "targets": [target.name for target in roles.targets]},
    )


def _label_shifted(trained: Trained, roles: Roles, seed: int) -> list[Record]:
    """Return records on streams with drawn class marginals; each draw has a seed of its own."""
    soft = Entry("soft", {"statistics": "stream", "lr": 1e-3})  # the strongest of the baselines there
    wanted = [Entry("erm"), Entry("bn"), Entry("bn", {"statistics": "stream"}), soft, Entry("vnl")]
    return [
        result.record
        for draw in range(DRAWS)
        for result in compare(trained, roles, wanted, SHIFTED, 100 * seed + draw, dataset="digits")
    ]


def _examples(
    results: Sequence[Result], answers: Mapping[str, Tensor], classes: Sequence[str]
) -> list[Example]:
    """Return images of each target, first those that adaptation changed, as they come along the stream."""
    made: list[Example] = []
    for target in dict.fromkeys(result.record.target for result in results):
        by_method = {result.record.method: result for result in results if result.record.target == target}
        old, new = (by_method[method].outcome.probabilities for method in ("erm", "vnl"))
        changed = old.argmax(-1) != new.argmax(-1)
        shown = torch.cat([changed.nonzero()[:, 0], (~changed).nonzero()[:, 0]])[: EXAMPLES // 2]
        stream = by_method["vnl"].stream
        for position in shown.tolist():
            image = int(stream.order[position])
            truth = classes[int(answers[target][image])]
            before, after = _top(old[position], classes), _top(new[position], classes)
            made.append(Example(stream.images[torch.tensor([image])][0], truth, *before, *after, target))
    return made


def _top(p: Tensor, classes: Sequence[str]) -> tuple[str, float]:
    value, index = p.max(-1)
    return classes[int(index)], float(value)


def run_demo(config: DemoConfig, listen: Report, on_task: Callable[[TaskResult], None]) -> None:
    """Run all tasks, as many side by side as there are cores, and hand over each result as it comes.

    The ERM models come first: what is fitted and chosen with them serves the meta-trained ones after.
    """
    first = [Task("neighbor", seed, config) for seed in config.seeds]
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        messages = manager.Queue()
        workers = min(len(first), os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, context, initializer=_one_thread) as pool:
            waiting = [pool.submit(_work, task, messages) for task in first]
            try:
                while waiting:
                    _listen(messages, listen)
                    done = [future for future in waiting if future.done()]
                    waiting = [future for future in waiting if future not in done]
                    for result in (future.result() for future in done):
                        on_task(result)
                        if result.fitted is not None:
                            after = Task("meta", result.task.seed, config, result.fitted)
                            waiting.append(pool.submit(_work, after, messages))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _listen(messages: Any, listen: Report) -> None:
    """Pass on what the workers say, until they pause or have said a bit."""
    try:
        for _ in range(20):
            listen(*messages.get(timeout=0.2))
    except queue.Empty:
        return


def _one_thread() -> None:
    torch.set_num_threads(1)


def _work(task: Task, messages: "queue.Queue[tuple[str, str, int, int]]") -> TaskResult:
    return run_task(task, lambda *message: messages.put(message))


def best_in_hindsight(records: Sequence[Record], methods: Sequence[str]) -> list[Record]:
    """Return the records, of the named methods only those at each setup's best step size.

    Best by mean accuracy over seeds and targets: it looks at target labels, as no deployed method can. It is
    a favour to baselines; what is chosen on sources is never treated so.
    """
    groups: dict[tuple[str, ...], dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.method in methods:
            key = (record.algorithm, record.method, record.statistics, record.predict, record.stream)
            groups[key][record.protocol["adapter"]["lr"]].append(record)
    best = [max(by_lr.values(), key=_mean_accuracy) for by_lr in groups.values()]
    chosen = {id(record) for group in best for record in group}
    return [record for record in records if record.method not in methods or id(record) in chosen]


def _mean_accuracy(records: Sequence[Record]) -> float:
    return sum(record.accuracy for record in records) / len(records)


def smaller(config: DemoConfig) -> DemoConfig:
    """Return a demo of seconds, for tests: same steps, hardly any training."""
    return replace(config, seeds=config.seeds[:1], iterations=12, stream_images=40, epochs=5)
