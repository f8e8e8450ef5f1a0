"""Who does what when: tasks begin as soon as what they need is there; a worker stays with its images."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
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
    """A job, the tasks that wait for it, and how many it waits for itself."""

    job: Job
    name: str
    model: str
    images: str  # what the images it works on are known by
    rank: int  # the lower, the sooner
    waiting: list["Task"] = field(default_factory=list)
    needs: int = 0

    def waits_for(self, other: "Task") -> None:
        """Begin only when the other is done."""
        if self not in other.waiting:
            other.waiting.append(self)
            self.needs += 1


class Shift:
    """The state of a run: what is ready, who does what, what has failed."""

    def __init__(self, crew: Crew, tasks: Sequence[Task], listen: Listen) -> None:
        self.crew, self.listen = crew, listen
        self.ready = [task for task in tasks if not task.needs]
        self.doing: dict[int, Task] = {}
        self.last: dict[int, Task] = {}  # whose images and model a worker has at hand
        self.failures: list[Failure] = []
        self.gone: set[int] = set()  # by id, with what they needed
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
                    self._finish(task)
                    for after in task.waiting:
                        after.needs -= 1
                        if not after.needs:
                            self.ready.append(after)
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
        gone = [one for one in (task, *_all_waiting(task)) if id(one) not in self.gone]
        self.gone |= {id(one) for one in gone}
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
    """Return what cannot be done without a task, each once."""
    every = [one for after in task.waiting for one in (after, *_all_waiting(after))]
    return list({id(one): one for one in every}.values())


def make_tasks(plan: Plan, place: Place, done: Collection[tuple[str, str]]) -> list[Task]:
    """Return what is left to do, each task listed with those that wait for it."""
    by_key = {run.key: run for run in plan.trainings}
    measures = {
        run.key: run for run in plan.measures if any((run.key, target) not in done for target in run.results)
    }
    tasks: dict[Any, Task] = {}

    def task(job: Job, name: str, model: str, images: str, rank: int) -> Task:
        return tasks.setdefault(job_key(job), Task(job, name, model, images, rank))

    def training(run: TrainRun) -> Task | None:
        """Return the task of a model that is not there, after that of its weights."""
        job = TrainJob(run, place)
        if job.done:
            return None
        # Those with left-out models first: they take longest, and others wait for what they choose.
        rank = 5 if run.request.out_of_fold is None else 4
        made = task(job, _words(run), run.key, images_of(run), rank)
        if job.weights is not None:
            made.waits_for(task(job.weights, f"weights of {job.weights.backbone}", "", "", 3))
        return made

    for run in measures.values():
        model, chooser = by_key[run.model], by_key[run.chooser or run.model]
        job = MeasureJob(run, model, chooser, place)
        name = f"{run.entry.method}, {_words(model)}"
        measure = task(job, name, run.model, images_of(model), run_rank(run))
        first = [training(model), training(chooser)]
        if job.choice is not None and job.choice.chosen is None:
            name = f"{run.entry.method} ({job.choice.kind}), {_words(chooser)}"
            choice = task(job.choice, name, chooser.key, images_of(chooser), 2)
            if first[1] is not None:
                choice.waits_for(first[1])
            first.append(choice)
        for before in first:
            if before is not None:
                measure.waits_for(before)
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
