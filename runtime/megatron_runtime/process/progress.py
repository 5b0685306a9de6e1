"""The progress of a starting process, which its health server shows on the page /progress. Imports no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum

RATE_SECONDS = 30.0
FORWARD_SECONDS = 1.0


class Stage(StrEnum):
    """The stages of an engine's start, in order. A start can skip stages."""

    DOWNLOAD = "Download"
    VERIFY = "Verify"
    LOAD = "Load"
    COMPILE = "Compile"
    """Compilation of kernels, and the warm-up."""
    CAPTURE = "Capture"


COUNTS_BYTES = frozenset({Stage.DOWNLOAD, Stage.VERIFY, Stage.LOAD})


class StartProgress:
    """The current stage of an engine's start, and how much of the stage is complete. Thread-safe.

    clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._current: tuple[Stage, int, int] | None = None
        self._samples: deque[tuple[float, int]] = deque()
        """Time and amount of the reports of the last 30 seconds."""
        self.forward: Callable[[Stage, int, int], None] | None = None
        """Called with a report at each new stage and every second, if another process serves the probes."""
        self._forwarded = 0.0

    def report(self, stage: Stage, done: int = 0, total: int = 0) -> None:
        """Record the progress of a stage.

        done, total: amounts in bytes, or in any unit if the stage does not count bytes. A total of 0 means unknown.
        """
        now = self._clock()
        if is_new := self._current is None or self._current[0] is not stage:
            self._samples = deque()
        if self.forward is not None and (is_new or now - self._forwarded >= FORWARD_SECONDS):
            self._forwarded = now
            self.forward(stage, done, total)
        samples = self._samples
        samples.append((now, done))
        while now - samples[0][0] > RATE_SECONDS:
            samples.popleft()
        self._current = stage, done, total

    @property
    def total(self) -> int:
        """The total amount of the current stage, as last reported."""
        return self._current[2] if self._current is not None else 0

    def page(self) -> Mapping[str, object] | None:
        """Return the current stage and, if known, its completed and total bytes, its rate and its remaining seconds.

        Returns None before the first report.
        """
        if self._current is None:
            return None
        stage, done, total = self._current
        (since, first), (until, last) = self._samples[0], self._samples[-1]
        rate = max(0.0, (last - first) / (until - since)) if until > since else 0.0
        report: dict[str, object] = {"stage": stage.value}
        if total and stage in COUNTS_BYTES:
            report |= {"bytes": done, "totalBytes": total, "bytesPerSecond": round(rate)}
        if total and rate:
            report["secondsLeft"] = round(max(0, total - done) / rate)
        return report


PROGRESS = StartProgress()
"""The progress of this process, which starts one engine."""
