"""Progress: a bar on a terminal, and elsewhere a plain line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 30.0  # seconds from one plain line to the next

_console: ContextVar[Console | None] = ContextVar("steelman console", default=None)
_notes: ContextVar[bool] = ContextVar("steelman notes", default=False)


@contextlib.contextmanager
def showing(console: Console | None, *, notes: bool = False) -> Iterator[None]:
    """Show the progress of what runs in this block on `console`, with its notes if asked for.

    Without such a block nothing is printed.

    >>> with showing(Console(quiet=True)), Ticker("fast") as tell:
    ...     tell("targets", 512, 2000)
    """
    tokens = _console.set(console), _notes.set(notes)
    try:
        yield
    finally:
        _console.reset(tokens[0])
        _notes.reset(tokens[1])


def note(text: str) -> None:
    """Print a line on the console of ``showing(console, notes=True)``. Without such a block nothing is printed."""
    if (console := _console.get()) is not None and _notes.get():
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a line that must be seen: on the console of `showing`, or else on the terminal."""
    console = _console.get() or Console()
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class Ticker:
    """Shows the progress of a task. `name` is the task, and `unit` is what is counted.

    On a terminal it is a bar that vanishes at the end. Elsewhere, such as in a log, it is a plain line at most every
    30 seconds: ``fast: targets, 512 of 2,000 samples``.

    A task may have several parts. Each part has its own clock, from which the bar estimates the time left. With
    `one_clock`, all parts share one clock. `done` and `total` are then those of the whole task.
    """

    def __init__(self, name: str, unit: str = "samples", *, one_clock: bool = False) -> None:
        self.name, self.unit, self.one_clock = name, unit, one_clock
        self._console = _console.get()
        self._bar: Progress | None = None
        if self._console is not None and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task(name, note="")
        self._what, self._next = "", time.monotonic() + EVERY

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """Say that `done` of `total` are done in the part `what`. `note` is a short text for the end of the line."""
        if self._bar is not None:
            if what != self._what and not self.one_clock:
                self._bar.reset(self._task)
            self._what = what
            description = f"{self.name}: {what}"
            self._bar.update(self._task, description=description, completed=done, total=max(total, 1), note=note)
        elif self._console is not None and time.monotonic() >= self._next:
            said = f"{self.name}: {what}, {done:,} of {total:,} {self.unit}{f', {note}' if note else ''}"
            # Text is not markup: a name may be "[red]".
            self._console.print(said, markup=False, highlight=False, soft_wrap=True)
            self._next = time.monotonic() + EVERY

    def __enter__(self) -> Ticker:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
