"""Who does what when: tasks begin as soon as what they need is there; a worker stays with its images."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from vicinal.benchmarks.jobs import ChooseJob, MeasureJob, Place, TrainJob, WeightsJob, images_of
from vicinal.benchmarks.plan import MeasureRun, Plan, TrainRun
from vicinal.benchmarks.workers import Crew

# The dearest first, so that no process is left alone with one at the end.
DEAREST = ("cotta", "memo", "ttt_pp", "ttt", "tast", "vnl")
KINDS = ("weights", "trainings", "step sizes", "measurements")
Job = WeightsJob | TrainJob | ChooseJob | MeasureJob
Listen = Callable[[str, str, int, int], None]  # whose progress, what it is at, done, total


@dataclass(frozen=True)
class Failure:
    """A job that could not be done, why, and which measurements go with it, by their keys."""

    what: str
    why: str
    keys: frozenset[str]


@dataclass(eq=False)
class Task:
    """A job, and the tasks that wait for it."""

    job: Job
    name: str
    model: str
    images: str  # what the images it works on are known by
    rank: int  # the lower, the sooner
    waiting: list["Task"] = field(default_factory=list)


class Shift:
    """The state of a run: what is ready, who does what, what has failed."""

    def __init__(self, crew: Crew, tasks: Sequence[Task], listen: Listen) -> None:
        later = {id(after) for task in tasks for after in task.waiting}
        self.crew, self.listen = crew, listen
        self.ready = [task for task in tasks if id(task) not in later]
        self.doing: dict[int, Task] = {}
        self.last: dict[int, Task] = {}  # whose images and model a worker has at hand
        self.failures: list[Failure] = []
        self.total = {kind: sum(kind_of(task) == kind for task in tasks) for kind in KINDS}
        self.done = dict.fromkeys(KINDS, 0)

    def run(self) -> list[Failure]:
        """Have everything done; return what could not be."""
        for kind in KINDS:
            self._count(kind)
        while self.ready or self.doing:
            for worker in self.crew.idle:
                if self.ready:
                    self._begin(worker, self._next(worker))
            for heard in self.crew.hear():
                task = self.doing[heard.worker]
                if heard.kind == "said":
                    stage, done, total = heard.body
                    self.listen(f"worker {heard.worker + 1}", f"{task.name}: {stage}", done, total)
                    continue
                del self.doing[heard.worker]
                if heard.kind == "done":
                    self.ready += task.waiting
                    self._finish(task)
                else:
                    self._fail(task, heard.body)
        return self.failures

    def _next(self, worker: int) -> Task:
        """Return the most urgent task on the images that the worker has at hand, else on any.

        Loading images takes as long as a short stream. Of equally urgent tasks, the one on the same model.
        """
        last = self.last.get(worker)

        def order(one: Task) -> tuple[bool, int, bool]:
            return (
                last is None or one.images != last.images,
                one.rank,
                last is None or one.model != last.model,
            )

        task = min(self.ready, key=order)
        self.ready.remove(task)
        return task

    def _begin(self, worker: int, task: Task) -> None:
        self.doing[worker] = self.last[worker] = task
        self.listen(f"worker {worker + 1}", task.name, 0, 1)
        self.crew.give(worker, task.job)

    def _finish(self, task: Task) -> None:
        self.done[kind_of(task)] += 1
        self._count(kind_of(task))

    def _fail(self, task: Task, why: str) -> None:
        """Note a failure once; whatever waits for the task goes with it."""
        gone = [task, *_all_waiting(task)]
        keys = frozenset(one.job.run.key for one in gone if isinstance(one.job, MeasureJob))
        self.failures.append(Failure(task.name, why, keys))
        for one in gone:
            self._finish(one)

    def _count(self, kind: str) -> None:
        if self.total[kind]:
            self.listen(kind, "", self.done[kind], self.total[kind])


def kind_of(task: Task) -> str:
    """Return what a task is counted as."""
    return KINDS[(WeightsJob, TrainJob, ChooseJob, MeasureJob).index(type(task.job))]


def _all_waiting(task: Task) -> list[Task]:
    return [one for after in task.waiting for one in (after, *_all_waiting(after))]


def make_tasks(plan: Plan, place: Place, done: Collection[tuple[str, str]]) -> list[Task]:
    """Return what is left to do, each task listed with those that wait for it."""
    by_key = {run.key: run for run in plan.trainings}
    measures = {
        run.key: run for run in plan.measures if any((run.key, target) not in done for target in run.results)
    }
    tasks: dict[Any, Task] = {}

    def task(job: Job, name: str, model: str, images: str, rank: int) -> Task:
        return tasks.setdefault(job_key(job), Task(job, name, model, images, rank))

    for run in measures.values():
        training = by_key[run.model]
        images = images_of(training)
        job = MeasureJob(run, training, place)
        chain = [task(job, f"{run.entry.method}, {_words(training)}", run.model, images, run_rank(run))]
        if job.choice is not None and job.choice.chosen is None:
            name = f"{run.entry.method} ({job.choice.kind}), {_words(training)}"
            chain.append(task(job.choice, name, run.model, images, 2))
        train_job = TrainJob(training, place)
        if not train_job.done:
            chain.append(task(train_job, _words(training), run.model, images, 4))
            if train_job.weights is not None:
                name = f"weights of {train_job.weights.backbone}"
                chain.append(task(train_job.weights, name, "", "", 3))
        for after, before in pairwise(chain):
            if after not in before.waiting:
                before.waiting.append(after)
    return list(tasks.values())


def job_key(job: Job) -> tuple[str, ...]:
    """Return what makes two jobs one."""
    if isinstance(job, WeightsJob):
        return ("weights", job.backbone, job.weights)
    extra = (job.name, job.kind) if isinstance(job, ChooseJob) else ()
    return (type(job).__name__, job.run.key, *extra)


def run_rank(run: MeasureRun) -> int:
    """Return how soon to measure: before any training on the same images, the dearest first."""
    return 0 if run.entry.method in DEAREST else 1


def _words(run: TrainRun) -> str:
    targets = "+".join(run.request.targets[:3]) + ("..." if len(run.request.targets) > 3 else "")
    return f"{run.algorithm} on {Path(run.request.data).name} without {targets}, seed {run.seed}"
