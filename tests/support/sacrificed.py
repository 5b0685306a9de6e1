"""A child for the tests of SacrificialProcess: it executes requests that crash, stall or exhaust its process."""

import ctypes
import mmap
import os
import time
from collections.abc import Callable

from megatron_runtime.process.sacrificial_process import serve

RESERVED = mmap.mmap(-1, 1 << 30)
"""As much address space as a numerical library reserves when it is loaded on a machine with 25 CPUs."""


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    if setup == b"fail":
        raise ValueError("configured to fail")

    def handle(request: bytes) -> bytes:
        match request.split():
            case [b"crash"]:
                ctypes.string_at(0)
            case [b"sleep", seconds]:
                time.sleep(float(seconds))
            case [b"hold", seconds]:  # native code that holds the interpreter lock
                ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))
            case [b"allocate", size]:
                return str(len(bytearray(int(size)))).encode()
            case [b"reply", size]:
                return b"x" * int(size)
            case [b"raise"]:
                raise ValueError("a defect of the handler")
        return b"%d %s %s" % (os.getpid(), setup, request)

    return handle


if __name__ == "__main__":
    serve(prepare)
