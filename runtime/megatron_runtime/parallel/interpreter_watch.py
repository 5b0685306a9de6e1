"""Ends a process whose interpreter hangs, from a thread that needs no interpreter. No torch.

Whoever holds the interpreter's lock for good, in whatever library, stops all that Python does: the other ranks notice
that the messages have ceased, and nobody in this process can end it. faulthandler's own thread can: it writes where
every thread is to standard error, which becomes the container's termination message, and ends the process.
"""

from __future__ import annotations

import faulthandler
import sys

HANG_SECONDS = 3.0
"""An interpreter that shows no sign of life for so long hangs, for the other ranks."""
END_SECONDS = 3.5
"""A moment later, so that the others have named it, it ends itself."""
LONG_SECONDS = 600.0
"""While weights are loaded: what reads them may hold the interpreter."""


class InterpreterWatch:
    """One a process: there is one such thread."""

    def beat(self, *, is_long: bool) -> None:
        """The interpreter lives. is_long: what it does now may hold it for long."""
        faulthandler.dump_traceback_later(LONG_SECONDS if is_long else END_SECONDS, exit=True, file=sys.stderr)

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
