"""The functions of a CUDA device that an executor needs: graphs, a second stream, and pinned host memory."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

Record = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Records the launches of a function.

Returns a function that repeats the launches, and the output of the launches. Each repetition overwrites this output.

While a function is recorded, no other thread of the process may allocate device memory or wait for the device.
"""
WARM_UP_RUNS = 2
"""Number of runs before a recording, because a recording must not compile kernels or initialise libraries."""


class DeviceFunctions(Protocol):
    """The functions of one device. Tests replace them with functions that run on the CPU."""

    def recorder(self) -> Record:
        """Return a Record, which records CUDA graphs. All graphs of one Record share one memory pool."""

    def aside(self) -> AbstractContextManager[None]:
        """Return a context manager within which kernels are launched on a second stream.

        These kernels start after all kernels that were launched before. On exit, the CPU waits for the second stream.
        """

    def host_memory(self, size: int) -> torch.Tensor:
        """Return `size` bytes of host memory, uint8, which the device can copy at full bus bandwidth."""


class CudaFunctions:
    """The DeviceFunctions of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def recorder(self) -> Record:
        pool = torch.cuda.graph_pool_handle()

        def record(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            with self.aside():
                for _ in range(WARM_UP_RUNS):
                    run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = run()
            return graph.replay, output

        return record

    @contextmanager
    def aside(self) -> Any:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def host_memory(self, size: int) -> torch.Tensor:
        # torch would round the size of its own pinned memory up to a power of two, and keep the memory.
        memory = (ctypes.c_byte * size).from_buffer(mmap.mmap(-1, size))
        address, runtime = ctypes.addressof(memory), torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(address, size, 0))
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)


class HostFunctions:
    """The DeviceFunctions of the CPU, which has neither graphs nor streams."""

    def recorder(self) -> Record:
        raise NotImplementedError("graph_rows must be 0 on a CPU, which has no CUDA graphs")

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def host_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)
