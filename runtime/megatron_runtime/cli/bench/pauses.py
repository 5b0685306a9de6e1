"""When the host of a virtual machine, or the machine itself, kept a processor from everybody.

A real-time process on each processor sleeps 0.2 ms at a time and writes down when it woke late: it goes before every
program, so whatever keeps it waiting kept the measured ones waiting, and a program's own slowness does not. Linux, and
the right to real-time priority, are needed.
"""

from __future__ import annotations

import gc
import os
import select
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

SLEEP_SECONDS = 0.0002
LATE_SECONDS = 0.0002
"""Later than this is a pause."""
MOST_PROCESSORS = 32
_PRIORITY = 10


@dataclass(frozen=True, slots=True, order=True)
class Stretch:
    """From and to, by time.perf_counter(), which all processes of a machine share on Linux."""

    begun: float
    ended: float


@dataclass(frozen=True, slots=True, order=True)
class Trip(Stretch):
    """A request, from its first word to its last. on_the_way_ms: what of it was spent between client and engine."""

    on_the_way_ms: float


class PauseWatch:
    """Watches as long as its context lasts. pauses: found by then; None where nobody could watch."""

    def __init__(self) -> None:
        self.pauses: list[Stretch] | None = None
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        processors = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
        if len(processors) > MOST_PROCESSORS:
            return self
        command = [sys.executable, "-m", __name__]
        self._processes = [
            subprocess.Popen([*command, str(processor)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for processor in processors
        ]
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        outputs = [process.communicate()[0] for process in self._processes]
        if self._processes and not any(process.returncode for process in self._processes):
            lines = [line.split() for output in outputs for line in output.splitlines()]
            self.pauses = sorted(Stretch(float(begun), float(ended)) for begun, ended in lines)


def undisturbed(trips: Iterable[Trip], pauses: Sequence[Stretch]) -> list[Trip]:
    """Trips of the times in which something was on its way without a break and no pause fell.

    A pause delays what comes after it too, until all that waited is done: so times, not trips, are left out.
    """
    kept: list[Trip] = []
    pauses = _united(pauses)
    together: list[Trip] = []
    ended = 0.0
    for trip in sorted(trips):
        if together and trip.begun > ended:
            kept += _unless_paused(together, ended, pauses)
            together = []
        ended = max(ended, trip.ended) if together else trip.ended
        together.append(trip)
    if together:
        kept += _unless_paused(together, ended, pauses)
    return kept


def _unless_paused(together: list[Trip], ended: float, pauses: list[Stretch]) -> list[Trip]:
    first = bisect_left(pauses, together[0].begun, key=lambda pause: pause.ended)
    return [] if first < len(pauses) and pauses[first].begun <= ended else together


def _united(pauses: Sequence[Stretch]) -> list[Stretch]:
    """In order, none of them overlapping: one processor's and another's become one."""
    united: list[Stretch] = []
    for pause in sorted(pauses):
        if united and pause.begun <= united[-1].ended:
            united[-1] = Stretch(united[-1].begun, max(united[-1].ended, pause.ended))
        else:
            united.append(pause)
    return united


def main() -> None:
    """Watch a processor until standard input ends; then print a line for each pause. Status 1 where that is not
    permitted.
    """
    os.sched_setaffinity(0, {int(sys.argv[1])})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except PermissionError:
        sys.exit(1)
    gc.disable()
    found: list[tuple[float, float]] = []
    now, most, told = time.perf_counter, SLEEP_SECONDS + LATE_SECONDS, [sys.stdin.fileno()]
    print("watching", flush=True)
    before = now()
    while not select.select(told, (), (), SLEEP_SECONDS)[0]:
        woken = now()
        if woken - before > most:
            found.append((before, woken))
        before = woken
    for begun, ended in found:
        print(begun, ended)


if __name__ == "__main__":
    main()
