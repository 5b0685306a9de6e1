"""A coordinator's threads ask the scheduler for short slices: read back from the kernel."""

import ctypes
import os
import struct
import threading
from pathlib import Path

import pytest

from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.spawn import spawn_coordinator
from megatron_runtime.process.scheduler_hints import SLICE_NANOSECONDS, request_scheduler_slices

_ATTR = struct.Struct("=IIQiIQQQ")
_GETATTR = {"x86_64": 315, "aarch64": 275}


def slice_and_nice(thread_id: int) -> tuple[int, int]:
    """What the kernel grants a thread, 0 where it does not say, and its niceness."""
    number = _GETATTR.get(os.uname().machine)
    if number is None:
        return 0, 0
    attributes = ctypes.create_string_buffer(_ATTR.size)
    ctypes.CDLL(None).syscall(ctypes.c_long(number), thread_id, attributes, _ATTR.size, 0)
    _, _, _, nice, _, nanoseconds, _, _ = _ATTR.unpack(attributes.raw)
    return nanoseconds, nice


needs_slices = pytest.mark.skipif(not slice_and_nice(0)[0], reason="this kernel does not tell a thread's slice")


@needs_slices
def test_every_thread_of_a_coordinator_has_them() -> None:
    coordinator = spawn_coordinator(CoordinatorSettings(listen="127.0.0.1", client_port=0, single_port=True))
    try:
        threads = [int(path.name) for path in Path(f"/proc/{coordinator.pid}/task").iterdir()]
        assert {slice_and_nice(thread) for thread in threads} == {(SLICE_NANOSECONDS, os.nice(0))}
    finally:
        coordinator.stop()


@needs_slices
def test_nothing_else_of_a_thread_changes() -> None:
    seen = []

    def ask() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        seen.append(request_scheduler_slices())
        seen.append(slice_and_nice(0))
        seen.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert seen == [True, (SLICE_NANOSECONDS, 5), os.SCHED_OTHER]
