"""Processes side by side: each takes a job at a time, says how far it is, and dies with its parent."""

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal

import torch

from vicinal.errors import VicinalError
from vicinal.training.progress import StopRequest

SAY_EVERY = 0.2  # seconds between two messages of progress
GRACE = 5.0  # seconds a training has to save its state when it is asked to stop


@dataclass
class Desk:
    """What a job finds in its process: a device, somebody who listens, and what earlier jobs left there."""

    device: str
    stop: StopRequest
    send: Callable[[tuple[str, Any]], None]
    kept: dict[str, tuple[str, Any]] = field(default_factory=dict)
    _said: float = 0.0

    def say(self, stage: str, done: int, total: int) -> None:
        """Tell the parent how far the job is, not too often."""
        if done >= total or time.monotonic() - self._said > SAY_EVERY:
            self._said = time.monotonic()
            self.send(("said", (stage, done, total)))

    def keep(self, kind: str, key: str, make: Callable[[], Any]) -> Any:
        """Return what `make` makes, kept until another key of its kind is asked for."""
        if kind not in self.kept or self.kept[kind][0] != key:
            self.kept.pop(kind, None)  # room for the new one before it is made
            self.kept[kind] = (key, make())
        return self.kept[kind][1]


Work = Callable[[Any, Desk], None]


@dataclass(frozen=True)
class Heard:
    """What came from a worker: how far its job is, that it is done, or why it failed."""

    worker: int
    kind: Literal["said", "done", "failed"]
    body: Any = None


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    job: Any = None


class Crew:
    """Workers, one for each device named; used as a context.

    Left by an error or an interrupt, jobs that can save themselves get a moment to do so.
    """

    def __init__(self, work: Work, devices: Sequence[str], start: str = "spawn") -> None:
        self._work, self._devices, self._context = work, list(devices), get_context(start)
        self._workers: dict[int, _Worker] = {}

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                self._stop()
        finally:
            for worker in self._workers.values():
                worker.process.kill()
            for worker in self._workers.values():
                worker.process.join()

    @property
    def idle(self) -> list[int]:
        """The workers that have no job; one that was never needed has not been started."""
        numbers = range(len(self._devices))
        return [n for n in numbers if n not in self._workers or self._workers[n].job is None]

    @property
    def busy(self) -> bool:
        """Whether any worker has a job."""
        return any(worker.job is not None for worker in self._workers.values())

    def give(self, number: int, job: Any) -> None:
        """Hand a job to an idle worker."""
        worker = self._workers.get(number) or self._started(number)
        worker.job = job
        worker.pipe.send(("job", job))

    def hear(self, timeout: float | None = None) -> list[Heard]:
        """Return what the workers said, waiting for one to speak; a worker that died has failed its job."""
        pipes: dict[Any, int] = {worker.pipe: number for number, worker in self._workers.items()}
        heard = []
        for pipe in wait(list(pipes), timeout):
            number = pipes[pipe]
            worker = self._workers[number]
            try:
                kind, body = worker.pipe.recv()
            except (EOFError, OSError):
                worker.process.join()
                del self._workers[number]
                if worker.job is None:
                    continue
                kind, body = "failed", f"its process died ({_ending(worker.process.exitcode)})"
            if kind != "said":
                worker.job = None
            heard.append(Heard(number, kind, body))
        return heard

    def _started(self, number: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        threads = max(1, (os.cpu_count() or 1) // len(self._devices))
        arguments = (theirs, self._work, self._devices[number], threads)
        # mypy does not know that every context makes processes.
        process = self._context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        process.start()
        theirs.close()  # else its end would never show
        self._workers[number] = _Worker(process, ours)
        return self._workers[number]

    def _stop(self) -> None:
        """Ask for a stop and wait a moment for those who heed it."""
        for worker in self._workers.values():
            if worker.job is not None:
                worker.pipe.send(("stop", None))
        until = time.monotonic() + GRACE
        while time.monotonic() < until and any(
            getattr(worker.job, "saves_itself", False) for worker in self._workers.values()
        ):
            self.hear(0.1)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {-code}; was there enough memory?"
    return f"exit code {code}"


def _serve(pipe: Connection, work: Work, device: str, threads: int) -> None:
    """Do one job after another until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too and decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Small nets are bound by overhead: on CPUs one core each, side by side, and the same sums whatever the
    # number of workers. A GPU leaves the CPU to what feeds it.
    torch.set_num_threads(1 if device == "cpu" else threads)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # kernels of our own start on the current device
    jobs: SimpleQueue[Any] = SimpleQueue()
    desk = Desk(device, StopRequest(), pipe.send)
    threading.Thread(target=_listen, args=(pipe, jobs, desk.stop), daemon=True).start()
    while True:
        job = jobs.get()
        try:
            work(job, desk)
        except VicinalError as error:
            pipe.send(("failed", " ".join(str(error).split())))
        except Exception as error:  # a job must not take the others down with it
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(last.filename)}, line {last.lineno}"  # noqa: PTH119
            pipe.send(("failed", f"{type(error).__name__}: {' '.join(str(error).split())} ({place})"))
        else:
            pipe.send(("done", None))


def _listen(pipe: Connection, jobs: "SimpleQueue[Any]", stop: StopRequest) -> None:
    """Take jobs and the request to stop; without a parent there is nobody to work for."""
    while True:
        try:
            kind, body = pipe.recv()
        except (EOFError, OSError):
            os._exit(1)
        if kind == "stop":
            stop.asked = True
        else:
            jobs.put(body)
