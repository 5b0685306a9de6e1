"""Gives hints to the Linux scheduler for a process that often runs for a short time."""

from __future__ import annotations

import ctypes
import logging
import os
import struct

logger = logging.getLogger(__name__)

SLICE_NANOSECONDS = 100_000
"""Time slice to request, the shortest that Linux grants."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
"""struct sched_attr of sched_setattr(2): size, policy, flags, nice, priority, runtime, deadline, period."""


def request_scheduler_slices() -> bool:
    """Request time slices of 0.1 ms instead of about 3 ms, for this thread and the threads that it starts later.

    The threads do not get more CPU time, but they get it earlier. On a loaded machine, a thread handles a message after
    0.1 ms instead of after another process's whole slice. The request needs no privilege. Kernels before 6.12 ignore
    it.

    Return False on machines other than x86-64 and ARM, or if the kernel rejects the request.
    """
    number = _SCHED_SETATTR.get(os.uname().machine)
    if number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, SLICE_NANOSECONDS, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(0), ctypes.c_char_p(attributes), ctypes.c_uint(0)) != 0:
        logger.info("the kernel rejected short scheduler slices: %s", os.strerror(ctypes.get_errno()))
        return False
    return True
