"""The thread pool of the C++ kernels, which runs steps and matrix products in parallel.

Its threads sleep between jobs.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from megatron_kernels.cpu.library import library


class ThreadPool:
    """A pool of `threads` threads, including the calling thread. It runs one job at a time.

    handle: the pool as an argument of the library's functions.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._library = library()
        self.handle: int | None = self._library.megatron_create_pool(threads)
        if self.handle is None:
            raise MemoryError(f"{threads} threads of the CPU kernels cannot be started")

    def close(self) -> None:
        """Stop the threads of the pool."""
        if self.handle is not None:
            self._library.megatron_destroy_pool(self.handle)
            self.handle = None


@cache
def _thread_pool(threads: int, process: int) -> ThreadPool:
    return ThreadPool(threads)


def shared_thread_pool() -> ThreadPool:
    """Return the thread pool of this process. It has the same number of threads as torch."""
    return _thread_pool(torch.get_num_threads(), os.getpid())
