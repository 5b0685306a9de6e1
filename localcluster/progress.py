"""Reports the steps of the launcher and their durations, in a live display on a terminal, otherwise in plain lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

DETAIL_SECONDS = 15.0
"""Minimum seconds between two lines about one step without a live display."""


class Step:
    """A running step of the launcher. note() sets the step's result, and detail() sets its current activity."""

    def __init__(
        self, progress: Progress | None, task: object, title: str, say: Callable[[str], None], interval: float
    ) -> None:
        self._progress = progress
        self._task = task
        self._title = title
        self._say = say
        self._interval = interval
        self._last_printed = time.monotonic()
        self.result = ""

    def detail(self, text: str) -> None:
        """Show the current activity. Without a live display, print at most one line per `interval` of Steps."""
        if self._progress is not None:
            self._progress.update(self._task, description=f"{escape(self._title)} [dim]{escape(text)}[/dim]")  # type: ignore[arg-type]
        elif time.monotonic() - self._last_printed >= self._interval:
            self._last_printed = time.monotonic()
            self._say(f"          … {self._title}: {text}")

    def note(self, text: str) -> None:
        self.result = text


class Steps:
    """A reporter of steps. Thread-safe: several threads can report steps at the same time.

    Args:
        quiet: whether to print nothing, for tests that start many clusters.
        console: console to print to, by default standard error, so that standard output stays usable in a pipe.
        interval: minimum seconds between two lines about the activity of a step if no live display is possible.
    """

    def __init__(
        self, *, quiet: bool = False, console: Console | None = None, interval: float = DETAIL_SECONDS
    ) -> None:
        self._interval = interval
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._running = 0

    def say(self, text: str) -> None:
        self._console.print(escape(text))

    @contextmanager
    def step(self, title: str, *, expect: str = "") -> Iterator[Step]:
        """Return a context that times a step. At the end, print the duration, the title and the result of the step.

        expect: announcement of a long step, which is printed at its start if there is no live display.
        """
        live = self._enter()
        task = live.add_task(escape(title), total=None) if live else None
        if live is None and expect:
            self.say(f"          … {title} ({expect})")
        step = Step(live, task, title, self.say, self._interval)
        start = time.monotonic()
        mark, style = "failed", "red"
        try:
            yield step
            mark, style = "", ""
        finally:
            if live is not None and task is not None:
                live.remove_task(task)
            self._leave()
            line = f"[{time.monotonic() - start:6.1f} s] {title}"
            line += f": {mark or step.result}" if mark or step.result else ""
            self._console.print(escape(line), style=style or None)

    def _enter(self) -> Progress | None:
        with self._lock:
            self._running += 1
            if self._progress is None and self._console.is_terminal and not self._console.quiet:
                self._progress = Progress(
                    SpinnerColumn(),
                    TextColumn("{task.description}"),
                    TimeElapsedColumn(),
                    console=self._console,
                    transient=True,
                )
                self._progress.start()
            return self._progress

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0 and self._progress is not None:
                self._progress.stop()
                self._progress = None
