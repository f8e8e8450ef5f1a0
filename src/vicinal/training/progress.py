"""How training tells what it is doing, without knowing who listens."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class Progress(Protocol):
    """Whoever wants to know. The command line draws bars; a library user may pass nothing."""

    def start(self, task: str, total: int, done: int = 0) -> None:
        """A task of `total` steps begins, `done` of them already behind."""

    def advance(self, done: int, terms: Mapping[str, float], images_per_second: float | None = None) -> None:
        """`done` steps are behind; these are the latest figures."""

    def note(self, text: str) -> None:
        """Something worth a line."""


class Silent:
    """Nobody listens."""

    def start(self, task: str, total: int, done: int = 0) -> None:
        """Do nothing."""

    def advance(self, done: int, terms: Mapping[str, float], images_per_second: float | None = None) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""


class Relay:
    """Progress passed on as plain messages: stage, steps done, steps in all."""

    def __init__(self, say: Callable[[str, int, int], None]) -> None:
        self._say = say
        self._task, self._total, self._part = "", 1, ""

    def start(self, task: str, total: int, done: int = 0) -> None:
        """Say that a task begins."""
        self._task, self._total = task, total
        self._say(task + self._part, done, total)

    def advance(self, done: int, terms: Mapping[str, float], images_per_second: float | None = None) -> None:
        """Say how far it is."""
        self._say(self._task + self._part, done, self._total)

    def note(self, text: str) -> None:
        """Name what the next tasks belong to."""
        self._part = f", {text}"


class StopRequest:
    """Whether the user asked to stop; checked between steps, so that no step is left half done."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Note the request; a second one interrupts at once."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stop_on_interrupt() -> Iterator[StopRequest]:
    """Turn Ctrl-C into a request that the loop grants at the end of its step."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = signal.signal(signal.SIGINT, request)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)
