"""Ends a process whose interpreter hangs, by an alarm that needs no interpreter. No torch.

Whoever holds the interpreter's lock for good, in whatever library, stops all that Python does: the other ranks notice
that the messages have ceased, and nobody in this process can end it. A timer of the operating system can: faulthandler
writes where every thread is to standard error, which becomes the container's termination message, and libc's _exit,
which is the signal's own handler, ends the process. Its default action would not: the first process of a container,
which a rank may be, is not ended by its own signals.
"""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys
import time

BEAT_SECONDS = 0.5
"""Between two signs of life."""
HANG_SECONDS = 3.0
"""An interpreter that shows no sign of life for so long hangs, for the other ranks. Patience may add to it."""
END_SECONDS = 4.5
"""It ends itself when the others, who look twice a second, have named it: for them it has ended by then."""
LONG_SECONDS = 600.0
"""While weights are loaded: what reads them may hold the interpreter."""
END_STATUS = int(signal.SIGALRM)
"""Exit status of a process that ends so."""


class Patience:
    """With an interpreter whose signs of life come late already, as where too many share a processor: their absence
    says less there. So it does where whoever listens is late.
    """

    REMEMBERED_SECONDS = 10.0
    TIMES_LATE = 3.0
    MOST_SECONDS = 10.0

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []
        self._heard: float | None = None

    def heard(self, now: float, *, was_long: bool = False) -> None:
        """A sign of life. was_long: it was free to come late."""
        late = now - self._heard - BEAT_SECONDS if self._heard is not None and not was_long else 0.0
        self._heard = now
        self.late(now, late)

    def late(self, now: float, seconds: float) -> None:
        """A sign of life came so late, or who listens looked so late."""
        kept = [(at, seconds) for at, seconds in self._late if at > now - self.REMEMBERED_SECONDS]
        self._late = [*kept, (now, seconds)] if seconds > 0 else kept

    @property
    def extra_seconds(self) -> float:
        """What to add to the time without a sign of life that means a hang: three times what the last ones were late.
        Some milliseconds on a machine that has processors for all, 10 s at most.
        """
        return min(self.MOST_SECONDS, self.TIMES_LATE * max((seconds for _, seconds in self._late), default=0.0))


class InterpreterWatch:
    """One a process: there is one such timer."""

    def __init__(self) -> None:
        self._patience = Patience()
        self._was_long = False
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGALRM, ctypes.cast(libc._exit, ctypes.c_void_p))
        faulthandler.register(signal.SIGALRM, file=sys.stderr, all_threads=True, chain=True)

    def beat(self, *, is_long: bool) -> None:
        """The interpreter lives. is_long: what it does now may hold it for long. From any thread."""
        self._patience.heard(time.monotonic(), was_long=self._was_long)
        self._was_long = is_long
        signal.setitimer(signal.ITIMER_REAL, LONG_SECONDS if is_long else END_SECONDS + self._patience.extra_seconds)

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.unregister(signal.SIGALRM)
