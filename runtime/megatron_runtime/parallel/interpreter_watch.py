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

HANG_SECONDS = 3.0
"""An interpreter that shows no sign of life for so long hangs, for the other ranks."""
END_SECONDS = 4.5
"""It ends itself when the others, who look twice a second, have named it: for them it has ended by then."""
LONG_SECONDS = 600.0
"""While weights are loaded: what reads them may hold the interpreter."""
END_STATUS = int(signal.SIGALRM)
"""Exit status of a process that ends so."""


class InterpreterWatch:
    """One a process: there is one such timer."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(signal.SIGALRM, ctypes.cast(libc._exit, ctypes.c_void_p))
        faulthandler.register(signal.SIGALRM, file=sys.stderr, all_threads=True, chain=True)

    def beat(self, *, is_long: bool) -> None:
        """The interpreter lives. is_long: what it does now may hold it for long. From any thread."""
        signal.setitimer(signal.ITIMER_REAL, LONG_SECONDS if is_long else END_SECONDS)

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.unregister(signal.SIGALRM)
