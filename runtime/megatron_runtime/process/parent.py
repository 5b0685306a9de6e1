"""Ties between a supervising process and its children."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "MEGATRON_PARENT_PID"
"""Set by a supervisor for its children: they end when that process does, however it ends."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Where a supervisor started this process, arrange for SIGTERM when the supervisor dies. Linux only."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The supervisor may have died before the call above: then no signal will come.
    if os.getppid() != int(parent):
        sys.exit(1)
