"""Ends a child process when its supervisor dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "MEGATRON_PARENT_PID"
"""A supervisor sets it for its children, which end when the supervisor ends for any reason."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """If a supervisor started this process, have the kernel send SIGTERM when the supervisor dies. Linux only."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # If the supervisor died before the call above, the kernel sends no signal.
    if os.getppid() != int(parent):
        sys.exit(1)
