"""The thread pool that runs compiled jobs in parallel. Threads sleep between jobs."""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_kernels.cpu.compiled import entry
from megatron_kernels.cpu.entry_points import (
    JOB,
    LEAD,
    MAKE_SEMAPHORES,
    POST,
    RUN_PRODUCT,
    RUN_STEP,
    SERVE,
    STOP,
)
from megatron_kernels.cpu.sizes import SEMAPHORE_BYTES


class ThreadPool:
    """A thread pool of `threads` threads, one of them the caller's. It runs one job at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._entry = entry()
        self._barrier: npt.NDArray[np.int64] = np.zeros(2, dtype=np.int64)
        self._job = np.zeros(1, dtype=JOB)
        self._lock = threading.Lock()
        others = threads - 1
        self._semaphores: npt.NDArray[np.uint8] = np.zeros(max(1, others) * SEMAPHORE_BYTES, dtype=np.uint8)
        self._entry(MAKE_SEMAPHORES, self._semaphores.ctypes.data, others, 0, 0)
        self._others = [
            threading.Thread(target=self._serve, args=(number,), name=f"megatron-native-{number}", daemon=True)
            for number in range(1, threads)
        ]
        for other in self._others:
            other.start()

    def run_step(self, record: npt.NDArray[Any]) -> None:
        """record: STEP[1]."""
        self._lead(RUN_STEP, record)

    def run_product(self, record: npt.NDArray[Any]) -> None:
        """record: PRODUCT[1]."""
        self._lead(RUN_PRODUCT, record)

    def close(self) -> None:
        """Stop the threads."""
        with self._lock:
            self._job["kind"] = STOP
            self._entry(POST, self._semaphores.ctypes.data, len(self._others), 0, 0)
            for other in self._others:
                other.join()
            self._others.clear()

    def _lead(self, kind: int, record: npt.NDArray[Any]) -> None:
        with self._lock:
            record["threads"], record["barrier"] = self.threads, self._barrier.ctypes.data
            self._job["kind"], self._job["record"] = kind, record.ctypes.data
            self._entry(LEAD, self._job.ctypes.data, self._semaphores.ctypes.data, len(self._others), 0)

    def _serve(self, number: int) -> None:
        semaphore = self._semaphores.ctypes.data + (number - 1) * SEMAPHORE_BYTES
        self._entry(SERVE, self._job.ctypes.data, semaphore, number, 0)


@cache
def _thread_pool(threads: int, process: int) -> ThreadPool:
    return ThreadPool(threads)


def shared_thread_pool() -> ThreadPool:
    """Return the thread pool of this process, with as many threads as torch."""
    return _thread_pool(torch.get_num_threads(), os.getpid())
