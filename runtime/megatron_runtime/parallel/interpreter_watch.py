"""Ends a process whose interpreter hangs, by an alarm that needs no interpreter. No torch.

Whoever holds the interpreter's lock for good, in whatever library, stops all that Python does: the other ranks notice
that the messages have ceased, and nobody in this process can end it. A timer of the operating system can: faulthandler
writes where every thread is to standard error, which becomes the container's termination message, and SIGALRM ends the
process.
"""

from __future__ import annotations

import faulthandler
import signal
import sys

HANG_SECONDS = 3.0
"""An interpreter that shows no sign of life for so long hangs, for the other ranks."""
END_SECONDS = 10.0
"""It ends itself when the others have named it and ended; not sooner, for a processor that too many share may keep it
from showing a sign of life for a while.
"""
LONG_SECONDS = 600.0
"""While weights are loaded: what reads them may hold the interpreter."""


class InterpreterWatch:
    """One a process: there is one such timer."""

    def __init__(self) -> None:
        faulthandler.register(signal.SIGALRM, file=sys.stderr, all_threads=True, chain=True)

    def beat(self, *, is_long: bool) -> None:
        """The interpreter lives. is_long: what it does now may hold it for long. From any thread."""
        signal.setitimer(signal.ITIMER_REAL, LONG_SECONDS if is_long else END_SECONDS)

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.unregister(signal.SIGALRM)
