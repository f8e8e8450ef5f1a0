"""Processes side by side: what they say arrives, and no failure of one, nor an end of all, is lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from vicinal.benchmarks import workers
from vicinal.benchmarks.workers import Crew, Desk, Heard
from vicinal.errors import DataError


@dataclass(frozen=True)
class Job:
    """Something to do: one of the functions below, on a path."""

    do: Callable[[Path, Desk], None]
    path: Path = Path()
    saves_itself: bool = False


def work(job: Job, desk: Desk) -> None:
    job.do(job.path, desk)


def write_device(path: Path, desk: Desk) -> None:
    desk.say("writing", 1, 2)
    with path.open("a") as file:
        file.write(f"{desk.device} {os.getpid()}\n")


def refuse(path: Path, desk: Desk) -> None:
    raise DataError("no such\nthing")


def stumble(path: Path, desk: Desk) -> None:
    raise ZeroDivisionError("by zero")


def die(path: Path, desk: Desk) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_when_asked(path: Path, desk: Desk) -> None:
    path.with_suffix(".begun").touch()
    while not desk.stop.asked:
        time.sleep(0.01)
    path.write_text("saved")


def sleep(path: Path, desk: Desk) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(600)


def count_makes(path: Path, desk: Desk) -> None:
    def make() -> int:
        with path.open("a") as file:
            file.write("made\n")
        return 1

    for key in ("a", "a", "b", "b", "a"):
        desk.keep("thing", key, make)


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew(work, ["cpu", "cpu"], "fork") as made:
        yield made


def outcome(crew: Crew) -> Heard:
    """Return the first that is not about progress."""
    while True:
        for heard in crew.hear(60):
            if heard.kind != "said":
                return heard


def test_jobs_are_done_and_say_how_far_they_are(crew: Crew, tmp_path: Path) -> None:
    assert crew.idle == [0, 1]
    crew.give(0, Job(write_device, tmp_path / "x"))
    assert (crew.idle, crew.busy) == ([1], True)
    heard: list[Heard] = []
    while len(heard) < 2:
        heard += crew.hear(60)
    assert heard == [Heard(0, "said", ("writing", 1, 2)), Heard(0, "done")]
    assert (crew.idle, crew.busy) == ([0, 1], False)
    assert (tmp_path / "x").read_text().startswith("cpu ")


def test_a_worker_keeps_its_process_and_its_device(tmp_path: Path) -> None:
    with Crew(work, ["cpu", "meta"], "fork") as crew:
        for number in (0, 1, 0, 1):
            crew.give(number, Job(write_device, tmp_path / str(number)))
            assert outcome(crew) == Heard(number, "done")
    for number, device in enumerate(("cpu", "meta")):
        first, second = (tmp_path / str(number)).read_text().splitlines()
        assert first == second
        assert first.startswith(f"{device} ")


def test_a_failure_is_one_line_and_the_worker_goes_on(crew: Crew, tmp_path: Path) -> None:
    crew.give(0, Job(refuse))
    assert outcome(crew) == Heard(0, "failed", "no such thing")
    crew.give(0, Job(stumble))
    failed = outcome(crew)
    assert failed.body.startswith("ZeroDivisionError: by zero (test_workers.py, line ")
    crew.give(0, Job(write_device, tmp_path / "x"))
    assert outcome(crew) == Heard(0, "done")


def test_a_worker_that_dies_has_failed_and_is_replaced(crew: Crew, tmp_path: Path) -> None:
    crew.give(1, Job(die))
    assert outcome(crew) == Heard(
        1, "failed", "its process died (killed by signal 9; was there enough memory?)"
    )
    assert crew.idle == [0, 1]
    crew.give(1, Job(write_device, tmp_path / "x"))
    assert outcome(crew) == Heard(1, "done")


def test_the_last_thing_of_a_kind_is_kept(crew: Crew, tmp_path: Path) -> None:
    crew.give(0, Job(count_makes, tmp_path / "x"))
    assert outcome(crew).kind == "done"
    assert (tmp_path / "x").read_text() == "made\n" * 3


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that only waits to be buried does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


def interrupted(jobs: list[Job], begun: Callable[[], bool]) -> None:
    """Give out jobs, and be interrupted when they have begun."""

    def run() -> None:
        with Crew(work, ["cpu"] * len(jobs), "fork") as crew:
            for number, job in enumerate(jobs):
                crew.give(number, job)
            assert wait_for(begun)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()


def test_on_an_interrupt_those_who_can_save_and_the_others_go_at_once(tmp_path: Path) -> None:
    saved, slept = tmp_path / "saved", tmp_path / "slept"
    started = time.monotonic()
    interrupted(
        [Job(save_when_asked, saved, saves_itself=True), Job(sleep, slept)],
        lambda: saved.with_suffix(".begun").exists() and slept.exists(),
    )
    assert saved.read_text() == "saved"
    assert not is_alive(int(slept.read_text()))
    assert time.monotonic() - started < 30


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GRACE", 0.3)
    # It says that it saves itself, and does not.
    interrupted([Job(sleep, tmp_path / "slept", saves_itself=True)], (tmp_path / "slept").exists)
    assert not is_alive(int((tmp_path / "slept").read_text()))


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_workers
from vicinal.benchmarks.workers import Crew
if __name__ == "__main__":
    with Crew(test_workers.work, ["cpu"], "spawn") as crew:
        crew.give(0, test_workers.Job(test_workers.sleep, Path({path!r})))
        while True:
            crew.hear(1)
"""


@pytest.mark.slow
def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "slept"
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(here=str(Path(__file__).parent), path=str(path)))
    parent = subprocess.Popen([sys.executable, str(script)])
    try:
        assert wait_for(lambda: path.exists() and path.read_text() != "", 120)
        child = int(path.read_text())
        assert is_alive(child)
    finally:
        parent.kill()  # the parent alone, not its group
        parent.wait()
    assert wait_for(lambda: not is_alive(child))
