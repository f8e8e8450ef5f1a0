"""Progress on a terminal: a bar a task, with the latest figures, images per second and the time left.

Into a file go lines: bars are drawn there once, when all is over, and hours would pass without a word.
"""

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

QUIET = 30.0  # seconds between two lines in a file


class Bars:
    """Bars for training, evaluation and demo; used as a context."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}", style="dim", markup=False),
            console=console,
        )
        self._current: TaskID | None = None
        self._prefix = ""
        self._validation: float | None = None
        self._named: dict[str, TaskID] = {}
        self._said = time.monotonic()

    def __enter__(self) -> "Bars":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def start(self, task: str, total: int, done: int = 0) -> None:
        """Begin a bar."""
        self._validation = None
        name = f"{task}{self._prefix}"
        self._current = self._bars.add_task(name, total=total, completed=done, figures="")

    def advance(self, done: int, terms: Mapping[str, float], images_per_second: float | None = None) -> None:
        """Move the latest bar and show its figures."""
        if self._current is None:
            return
        self._validation = terms.get("validation", self._validation)
        figures = [f"{name} {value:.3f}" for name, value in terms.items() if name != "validation"]
        if self._validation is not None:
            figures.append(f"validation {self._validation:.1%}")
        if images_per_second is not None:
            figures.append(f"{images_per_second:,.0f} images/s")
        self._bars.update(self._current, completed=done, figures="  ".join(figures))
        self._say(self._current)

    def note(self, text: str) -> None:
        """Name what the next bars belong to."""
        self._prefix = f", {text}"

    def count(self, name: str, stage: str, done: int, total: int) -> None:
        """Move a bar by its name; a new name gets a new bar."""
        if name not in self._named:
            self._named[name] = self._bars.add_task(name, total=total, figures=stage)
        self._bars.update(self._named[name], completed=done, total=total, figures=stage)
        self._say(self._named[name])

    def _say(self, which: TaskID) -> None:
        """Write how far a task is, where nobody sees its bar and nothing was said for a while."""
        if self._bars.console.is_terminal or time.monotonic() - self._said < QUIET:
            return
        self._said = time.monotonic()
        task = next(task for task in self._bars.tasks if task.id == which)
        line = f"{task.description}  {task.completed:.0f}/{task.total:.0f}  {task.fields['figures']}"
        self._bars.console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
