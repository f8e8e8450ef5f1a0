"""Who does what when, with workers that only pretend."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.benchmarks.jobs import ChooseJob, MeasureJob, TeachJob, TrainJob, WeightsJob
from vicinal.benchmarks.place import CHOICE, MODEL, TAUGHT, Place
from vicinal.benchmarks.plan import plan
from vicinal.benchmarks.schedule import Failure, Job, Shift, Task, make_tasks
from vicinal.benchmarks.spec import Row, Setting, Spec
from vicinal.benchmarks.workers import Heard

ROWS = (Row("ERM", "erm"), Row("Soft", "soft"), Row("Hard", "hard"), Row("VNL", "vnl"))
SPEC = Spec("made", "Made", seeds=2, settings=(Setting("Digits", "digits"),), rows=ROWS)


class Pretenders:
    """A crew that does nothing; the worker that has had its job longest is done first."""

    def __init__(self, count: int, fails: Callable[[Job], str] = lambda job: "") -> None:
        self.count, self.fails = count, fails
        self.doing: dict[int, Job] = {}
        self.given: list[tuple[int, Job]] = []
        self.ended: list[Job] = []

    @property
    def idle(self) -> list[int]:
        return [number for number in range(self.count) if number not in self.doing]

    def give(self, number: int, job: Job) -> None:
        assert number in self.idle
        self.doing[number] = job
        self.given.append((number, job))

    def hear(self) -> list[Heard]:
        number = next(iter(self.doing))
        job = self.doing.pop(number)
        self.ended.append(job)
        why = self.fails(job)
        return [Heard(number, "failed", why) if why else Heard(number, "done")]


def run(crew: Pretenders, tasks: list[Task]) -> tuple[list[Failure], list[tuple[str, int, int]]]:
    counts: list[tuple[str, int, int]] = []

    def listen(who: str, what: str, done: int, total: int) -> None:
        if not who.startswith("worker"):
            counts.append((who, done, total))

    return Shift(crew, tasks, listen).run(), counts  # type: ignore[arg-type]


def tasks_of(folder: Path, spec: Spec = SPEC, done: frozenset[tuple[str, str]] = frozenset()) -> list[Task]:
    return make_tasks(plan(spec), Place(folder), done)


@pytest.mark.parametrize("workers", [1, 2, 3, 10])
def test_everything_is_done_once_and_after_what_it_needs(tmp_path: Path, workers: int) -> None:
    crew, tasks = Pretenders(workers), tasks_of(tmp_path)
    failures, counts = run(crew, tasks)
    assert failures == []
    jobs = [job for _, job in crew.given]
    assert len(jobs) == len(set(map(id, jobs))) == len(tasks) == 2 + 2 + 4 + 8
    for _, job in crew.given:
        if isinstance(job, TeachJob):
            continue
        kind = TrainJob if isinstance(job, MeasureJob) else TeachJob
        needed: list[Job] = [one for one in jobs if isinstance(one, kind) and one.run.key == _model(job)]
        if isinstance(job, MeasureJob) and job.choice is not None:
            needed += [one for one in jobs if one == job.choice]
        assert len(needed) == 1 + (isinstance(job, MeasureJob) and job.choice is not None)
        started = jobs.index(job)
        for one in needed:
            assert jobs.index(one) < started
            assert one in crew.ended
    assert counts[-4:] != counts[:4]
    ends = {("rules", 2, 2), ("trainings", 2, 2), ("step sizes", 4, 4), ("measurements", 8, 8)}
    assert ends <= set(counts)


def _model(job: Job) -> str:
    assert not isinstance(job, WeightsJob)
    return job.run.model if isinstance(job, MeasureJob) else job.run.key


def test_measurements_do_not_wait_for_other_trainings(tmp_path: Path) -> None:
    crew = Pretenders(1)
    run(crew, tasks_of(tmp_path))
    kinds = [type(job).__name__ for _, job in crew.given]
    second = kinds.index("TeachJob", 1)
    # All that the first model is there for comes before anything for the second, in the order of the table.
    assert kinds[1:second].count("TrainJob") == 1
    assert kinds[1:second].count("MeasureJob") == 4
    assert measured_first(crew) == SPEC.rows[0].label


def measured_first(crew: Pretenders) -> str:
    return next(job.run.row for _, job in crew.given if isinstance(job, MeasureJob))


def test_the_dearest_measurements_come_first(tmp_path: Path) -> None:
    crew = Pretenders(1)
    dear = Row("CoTTA", "cotta", options={"lr": 1e-3})
    run(crew, tasks_of(tmp_path, replace(SPEC, rows=(*SPEC.rows, dear))))
    assert measured_first(crew) == "CoTTA"


def test_a_worker_stays_with_the_model_it_has_at_hand(tmp_path: Path) -> None:
    many = replace(SPEC, rows=tuple(Row(f"BN {n}", "bn", options={"num_samples": n}) for n in range(1, 9)))
    for run_ in plan(many).trainings:
        folder = Place(tmp_path).model(run_.key)
        folder.mkdir(parents=True)
        (folder / MODEL).touch()
    crew = Pretenders(2)
    run(crew, tasks_of(tmp_path, many))
    for number in (0, 1):
        models = [_model(job) for worker, job in crew.given if worker == number]
        assert sum(a != b for a, b in pairwise(models)) <= 1


def test_a_worker_stays_with_the_images_it_has_at_hand(tmp_path: Path) -> None:
    """Two algorithms and four seeds on two workers: each seed's images are loaded once, or once by each."""
    meta = (Row("VNL, meta", "vnl", algorithm="meta"), Row("Soft, meta", "soft", algorithm="meta"))
    crew = Pretenders(2)
    run(crew, tasks_of(tmp_path, replace(SPEC, seeds=4, rows=(*ROWS, *meta))))
    loaded = 0
    for number in (0, 1):
        seeds = [
            job.run.seed for worker, job in crew.given if worker == number and not isinstance(job, WeightsJob)
        ]
        loaded += 1 + sum(a != b for a, b in pairwise(seeds))
    assert 4 <= loaded <= 8


def test_what_is_on_disk_is_not_done_again(tmp_path: Path) -> None:
    place, made = Place(tmp_path), plan(SPEC)
    first, second = made.trainings
    for training in (first, second):
        place.model(training.key).mkdir(parents=True)
        (place.model(training.key) / MODEL).touch()
    (place.model(second.key) / "state-erm.safetensors").touch()  # to be cleared away
    choice = ChooseJob(first, "soft", "batch", place)
    choice.path.parent.mkdir()
    choice.path.write_text('{"batch": [{"lr": 0.1, "chosen": true}]}')
    done = {(one.key, target) for one in made.measures if one.row == "ERM" for target in one.targets}
    half = next(one for one in made.measures if one.row == "Hard")
    tasks = make_tasks(made, place, done | {(half.key, "0")})
    kinds = [type(task.job).__name__ for task in tasks]
    assert [task.job.run.key for task in tasks if isinstance(task.job, TrainJob)] == [second.key]
    assert kinds.count("ChooseJob") == 3  # not soft on the first
    assert kinds.count("MeasureJob") == 6
    # What was taught is taken out of the models, which nobody has to be trained for.
    assert all(
        task.job.in_model and task.job.weights is None for task in tasks if isinstance(task.job, TeachJob)
    )
    everything = {(one.key, target) for one in made.measures for target in one.targets}
    assert make_tasks(made, place, everything) == []


def test_rows_with_other_options_have_a_step_size_of_their_own(tmp_path: Path) -> None:
    rows = (
        Row("Soft", "soft", options={"statistics": "stream"}),
        Row("Pulled", "soft", options={"statistics": "stream", "pull": 0.02}),
        Row("Pulled again", "soft", options={"statistics": "stream", "pull": 0.02, "steps": 1}),
    )
    jobs = [task.job for task in make_tasks(plan(replace(SPEC, rows=rows)), Place(tmp_path), ())]
    choices = [job for job in jobs if isinstance(job, ChooseJob)]
    (first, *_) = choices
    assert {tuple(sorted(job.given)) for job in choices} == {(), ("pull",), ("pull", "steps")}
    assert first.path.name == "soft.json"
    assert len({job.path for job in choices}) == len(choices)


def test_a_failed_training_takes_along_what_needs_it_and_nothing_else(tmp_path: Path) -> None:
    crew = Pretenders(2, lambda job: "no weights" if isinstance(job, TrainJob) and job.run.seed == 0 else "")
    failures, counts = run(crew, tasks_of(tmp_path))
    (failure,) = failures
    assert (failure.why, len(failure.keys)) == ("no weights", 4)
    assert "seed 0" in failure.what
    measured = [job for _, job in crew.given if isinstance(job, MeasureJob)]
    assert [job.run.seed for job in measured] == [1, 1, 1, 1]
    assert counts[-1][1:] == (8, 8)  # the bar comes to its end


def test_a_failed_choice_takes_along_its_measurement_alone(tmp_path: Path) -> None:
    crew = Pretenders(2, lambda job: "odd" if isinstance(job, ChooseJob) and job.method == "soft" else "")
    failures, _ = run(crew, tasks_of(tmp_path))
    assert [len(failure.keys) for failure in failures] == [1, 1]
    measured = [job for _, job in crew.given if isinstance(job, MeasureJob)]
    assert sorted(job.run.row for job in measured) == ["ERM", "ERM", "Hard", "Hard", "VNL", "VNL"]


ONE = replace(SPEC, seeds=3, one_choice=True)


@pytest.mark.parametrize("workers", [1, 2, 10])
def test_who_takes_the_choice_of_another_seed_waits_for_both(tmp_path: Path, workers: int) -> None:
    crew, tasks = Pretenders(workers), tasks_of(tmp_path, ONE)
    failures, _ = run(crew, tasks)
    assert failures == []
    jobs = [job for _, job in crew.given]
    assert len(jobs) == len(tasks) == 1 + 3 + 2 + 12
    assert {job.run.seed for job in jobs if isinstance(job, TeachJob | ChooseJob)} == {0}
    assert isinstance(jobs[0], TeachJob)
    for started, job in enumerate(jobs):
        if isinstance(job, MeasureJob):
            chooser, model = job.run.chooser, job.training.key
            needed: list[Job] = [
                one
                for one in jobs
                if (isinstance(one, TrainJob) and one.run.key == model)
                or (isinstance(one, TeachJob) and one.run.key == chooser)
            ]
            needed += [one for one in jobs if one == job.choice]
            assert len(needed) == 1 + (chooser is not None) + (job.choice is not None)
            assert all(jobs.index(one) < started for one in needed)


def test_a_failed_chooser_takes_along_what_takes_its_choice_once(tmp_path: Path) -> None:
    def fails(job: Job) -> str:
        return (
            "full" if isinstance(job, TeachJob) or (isinstance(job, TrainJob) and job.run.seed == 1) else ""
        )

    crew = Pretenders(3, fails)
    failures, counts = run(crew, tasks_of(tmp_path, ONE))
    # Seed 0: its four and three of each other seed; seed 1: what was left of its own.
    assert sorted(len(failure.keys) for failure in failures) == [1, 10]
    measured = [job for _, job in crew.given if isinstance(job, MeasureJob)]
    assert [(job.run.seed, job.run.row) for job in measured] == [(2, "ERM")]
    ends = dict[str, tuple[int, int]]()
    for kind, done, total in counts:
        ends[kind] = done, total
    assert ends == {"rules": (1, 1), "trainings": (3, 3), "step sizes": (2, 2), "measurements": (12, 12)}


def test_who_takes_what_another_seed_was_taught_does_without_its_model(tmp_path: Path) -> None:
    crew = Pretenders(3, lambda job: "full" if isinstance(job, TrainJob) and job.run.seed == 0 else "")
    (failure,), _ = run(crew, tasks_of(tmp_path, ONE))
    assert len(failure.keys) == 4
    measured = [job.run.seed for _, job in crew.given if isinstance(job, MeasureJob)]
    assert sorted(measured) == [1] * 4 + [2] * 4


def bring_along(folder: Path, spec: Spec, *, but: str = "") -> None:
    """Put the small files of what was taught into a folder, less the step size of a method."""
    place = Place(folder)
    for task in make_tasks(plan(spec), place, (), teach=True):
        if isinstance(task.job, TeachJob):
            (place.model(task.job.run.key) / "step_sizes").mkdir(parents=True)
            for name in (TAUGHT, CHOICE):
                (place.model(task.job.run.key) / name).touch()
        elif isinstance(task.job, ChooseJob) and task.job.method != but:
            task.job.path.write_text(f'{{"{task.job.kind}": [{{"lr": 0.1, "chosen": true}}]}}')


def kinds_and_seeds(tasks: list[Task]) -> list[tuple[str, int]]:
    """Return the kind and the seed of every job but the measurements."""
    jobs = [task.job for task in tasks if not isinstance(task.job, MeasureJob | WeightsJob)]
    return sorted((type(job).__name__, job.run.seed) for job in jobs)


def test_what_was_taught_elsewhere_is_not_taught_again(tmp_path: Path) -> None:
    bring_along(tmp_path, ONE)
    assert kinds_and_seeds(tasks_of(tmp_path, ONE)) == [("TrainJob", seed) for seed in (0, 1, 2)]
    assert make_tasks(plan(ONE), Place(tmp_path), (), teach=True) == []
    # Where seed 0 is measured already, nobody needs its model.
    done = frozenset(
        (one.key, target) for one in plan(ONE).measures if one.seed == 0 for target in one.targets
    )
    assert kinds_and_seeds(tasks_of(tmp_path, ONE, done)) == [("TrainJob", 1), ("TrainJob", 2)]
    assert kinds_and_seeds(tasks_of(tmp_path / "elsewhere", ONE, done)) == [
        ("ChooseJob", 0),
        ("ChooseJob", 0),
        ("TeachJob", 0),
        ("TrainJob", 1),
        ("TrainJob", 2),
    ]


def test_a_step_size_that_was_not_brought_along_is_chosen(tmp_path: Path) -> None:
    bring_along(tmp_path, ONE, but="hard")
    assert kinds_and_seeds(tasks_of(tmp_path, ONE))[0] == ("ChooseJob", 0)
    (task,) = make_tasks(plan(ONE), Place(tmp_path), (), teach=True)
    assert isinstance(task.job, ChooseJob)
    assert (task.job.method, task.needs) == ("hard", 0)


def test_teaching_trains_and_measures_nothing_done_or_not(tmp_path: Path) -> None:
    made = plan(ONE)
    everything = {(one.key, target) for one in made.measures for target in one.results}
    for done in (set[tuple[str, str]](), everything):
        tasks = make_tasks(made, Place(tmp_path), done, teach=True)
        assert kinds_and_seeds(tasks) == [("ChooseJob", 0), ("ChooseJob", 0), ("TeachJob", 0)]
        assert len(tasks) == 3
    each = make_tasks(plan(SPEC), Place(tmp_path), (), teach=True)
    assert [seed for kind, seed in kinds_and_seeds(each) if kind == "TeachJob"] == [0, 1]
    alone = replace(SPEC, rows=ROWS[:1])
    assert make_tasks(plan(alone), Place(tmp_path), (), teach=True) == []


def test_a_run_that_stands_in_two_cells_is_one_task(tmp_path: Path) -> None:
    again = replace(SPEC.settings[0], name="Again", metric="ece")
    twice = replace(SPEC, settings=(*SPEC.settings, again), seeds=1)
    assert len(plan(twice).measures) == 8
    assert len([task for task in tasks_of(tmp_path, twice) if isinstance(task.job, MeasureJob)]) == 4


def test_weights_that_are_not_to_be_had_are_asked_for_once(tmp_path: Path) -> None:
    columns = tuple(
        Setting(name, "digits", backbone=name, weights="timm", size=32) for name in ("resnet18", "resnet34")
    )
    crew = Pretenders(2, lambda job: "no net" if job == WeightsJob("resnet18", "timm") else "")
    failures, counts = run(crew, tasks_of(tmp_path, replace(SPEC, settings=(*columns, *SPEC.settings))))
    assert [(failure.what, failure.why, len(failure.keys)) for failure in failures] == [
        ("weights of resnet18", "no net", 8)
    ]
    jobs = [job for _, job in crew.given]
    assert [job for job in jobs if isinstance(job, WeightsJob)] == [
        WeightsJob("resnet18", "timm"),
        WeightsJob("resnet34", "timm"),
    ]
    trained = [job.run.request.backbone for job in jobs if isinstance(job, TrainJob)]
    assert sorted(map(str, trained)) == ["None", "None", "resnet34", "resnet34"]
    assert ("measurements", 24, 24) in counts


def test_nobody_waits_for_weights_that_are_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    column = Setting("Mine", "digits", backbone="resnet18", weights=str(path), size=32)

    def kinds() -> set[type]:
        return {type(task.job) for task in tasks_of(tmp_path, replace(SPEC, settings=(column,)))}

    assert WeightsJob in kinds()  # one job finds out that it is missing
    path.touch()
    assert kinds() == {TeachJob, TrainJob, ChooseJob, MeasureJob}
    # Nor where the models are there, to take out of them what they were taught.
    path.unlink()
    for training in plan(replace(SPEC, settings=(column,))).trainings:
        Place(tmp_path).model(training.key).mkdir(parents=True)
        (Place(tmp_path).model(training.key) / MODEL).touch()
    assert kinds() == {TeachJob, ChooseJob, MeasureJob}
