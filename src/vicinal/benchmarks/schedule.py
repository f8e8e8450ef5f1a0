"""Who does what when: tasks begin as soon as what they need is there; a worker stays with its images."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vicinal.benchmarks.jobs import ChooseJob, MeasureJob, TeachJob, TrainJob, WeightsJob, images_of
from vicinal.benchmarks.place import Place
from vicinal.benchmarks.plan import MeasureRun, Plan, TrainRun
from vicinal.benchmarks.workers import Crew

# The dearest first, so that no process is left alone with one at the end.
DEAREST = ("cotta", "memo", "ttt_pp", "ttt", "tast")
KINDS = ("weights", "rules", "trainings", "step sizes", "measurements")
Job = WeightsJob | TeachJob | TrainJob | ChooseJob | MeasureJob
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
    return KINDS[(WeightsJob, TeachJob, TrainJob, ChooseJob, MeasureJob).index(type(task.job))]


def _all_waiting(task: Task) -> list[Task]:
    """Return what cannot be done without a task, each once."""
    every = [one for after in task.waiting for one in (after, *_all_waiting(after))]
    return list({id(one): one for one in every}.values())


def make_tasks(
    plan: Plan, place: Place, done: Collection[tuple[str, str]], *, teach: bool = False
) -> list[Task]:
    """Return what is left to do, each task listed with those that wait for it.

    With `teach` that is what is left to choose on left-out domains, also for what is measured already: no
    source model is trained for it.
    """
    by_key = {run.key: run for run in plan.trainings}
    jobs = [
        MeasureJob(run, by_key[run.model], by_key[run.chooser or run.model], place) for run in plan.measures
    ]
    tasks = _Tasks(place)
    for job in jobs:
        if teach:
            tasks.teaching(job.chooser)
            tasks.choosing(job)
        elif any((job.run.key, target) not in done for target in job.run.results):
            tasks.measuring(job)
    return list(tasks.made.values())


class _Tasks:
    """Tasks as they are asked for, each once, after those it waits for; None for what is there already."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.made: dict[tuple[str, ...], Task] = {}

    def measuring(self, job: MeasureJob) -> None:
        """Add a measurement: it needs its own model, and of a chooser only what left-out domains taught."""
        run, before = job.training, [self.training(job.training), self.choosing(job)]
        if job.run.chooser is not None:
            before.append(self.teaching(job.chooser))
        self._add(job, f"{job.run.entry.method}, {_words(run)}", run, run_rank(job.run), before)

    def choosing(self, job: MeasureJob) -> Task | None:
        """Return the choice of a measurement's step size, after the left-out models."""
        choice, run = job.choice, job.chooser
        if choice is None or choice.chosen is not None:
            return None
        name = f"{choice.method} ({choice.kind}), {_words(run)}"
        return self._add(choice, name, run, 2, [self.teaching(run)])

    def training(self, run: TrainRun) -> Task | None:
        """Return the training of a source model, after what left-out domains teach it."""
        job = TrainJob(run, self.place)
        if job.done:
            return None
        return self._add(job, _words(run), run, 5, [self._weights(job.weights), self.teaching(run)])

    def teaching(self, run: TrainRun) -> Task | None:
        """Return what left-out domains teach for a model; first of all: it takes longest, and many wait."""
        job = TeachJob(run, self.place)
        if run.request.out_of_fold is None or job.done:
            return None
        return self._add(job, f"rule, {_words(run)}", run, 4, [self._weights(job.weights)])

    def _weights(self, job: WeightsJob | None) -> Task | None:
        if job is None:
            return None
        return self.made.setdefault(job_key(job), Task(job, f"weights of {job.backbone}", "", "", 3))

    def _add(self, job: Job, name: str, run: TrainRun, rank: int, before: Iterable[Task | None]) -> Task:
        task = self.made.setdefault(job_key(job), Task(job, name, run.key, images_of(run), rank))
        for other in before:
            if other is not None:
                task.waits_for(other)
        return task


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
