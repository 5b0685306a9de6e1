"""The memory of packed weights, in large pages and distributed over all NUMA nodes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

PAGES_THREAD = "megatron-pages"
"""Name of the thread that joins small pages to large ones."""
_PAGE = 1 << 12
_LARGE_PAGE = 1 << 21
_CHUNK = 1 << 26
_PROVIDED = 1 << 22
_HUGEPAGE, _NOHUGEPAGE, _POPULATE_WRITE, _COLLAPSE = 14, 15, 23, 25
"""Values of the argument `advice` of madvise(2)."""
_MAX_SECONDS = 2e-3
"""Maximum CPU seconds for populating _PROVIDED bytes of large pages.

If populating takes longer, small pages are used.
"""
_MBIND = {"x86_64": 237, "aarch64": 235}
"""System call number of mbind(2) by machine."""
_INTERLEAVE = 3
"""The mode MPOL_INTERLEAVE of mbind(2)."""
_MASK_WORDS = 16
_NODES = Path("/sys/devices/system/node/online")
_REST = 3.0
"""Ratio of sleeping time to working time of the thread that joins pages."""
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Chunk:
    """A contiguous part of a mapping. start, stop, taken: addresses.

    The memory from `taken` to `stop` is not used yet.
    """

    mapping: mmap.mmap
    base: int
    start: int
    stop: int
    taken: int


class WeightMemory:
    """An allocator of memory for the weights of one model, used while the model is loaded. Thread-safe.

    Matrices share large mappings. A mapping is released when its last matrix is released.

    take() populates pages in bulk. It uses pages of 2 MiB while Linux provides them quickly (11 GB/s on AMD Zen 4). On
    a virtual machine whose host reclaims free memory, Linux provides them slowly (0.5 GB/s). Then take() uses pages of
    4 KiB (1.5 GB/s), and join_pages() joins these small pages later.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_large = True
        self._chunks: list[_Chunk] = []

    def take(self, size: int) -> torch.Tensor:
        """Return uninitialised memory, uint8 [size], that begins at a page boundary."""
        with self._lock:
            chunk = self._chunk_for(size)
            address = chunk.taken
            chunk.taken = min(_round_up(address + size, _PAGE), chunk.stop)
        # Populate the memory in pieces, because other threads may need memory too.
        for start in range(address, address + size, _PROVIDED):
            begun = time.thread_time()
            if _advise(start, min(_PROVIDED, address + size - start), _POPULATE_WRITE) != 0:
                break  # Linux before 5.14: pages are populated when they are first accessed
            if time.thread_time() - begun > _MAX_SECONDS:
                self._is_large = False
                # No large pages here until join_pages().
                _advise(chunk.start, chunk.stop - chunk.start, _NOHUGEPAGE)
        return torch.frombuffer(chunk.mapping, dtype=torch.uint8, count=size, offset=address - chunk.base)

    def take_panels(self, panels: int, size: int) -> torch.Tensor:
        """Return uninitialised memory, uint8 [panels, size], that begins at a page boundary."""
        return self.take(panels * size).view(panels, size)

    def join_pages(self) -> threading.Thread:
        """Start a thread that joins the small pages of the used memory into pages of 2 MiB. Return the thread.

        The thread sleeps three quarters of the time. A step reads large pages faster, because each TLB entry covers 512
        times as much memory.
        """
        with self._lock:
            parts = [(weakref.ref(chunk.mapping), chunk.start, chunk.taken) for chunk in self._chunks]
            self._chunks.clear()
        thread = threading.Thread(target=_join_pages, args=(parts,), name=PAGES_THREAD, daemon=True)
        thread.start()
        return thread

    def _chunk_for(self, size: int) -> _Chunk:
        for chunk in reversed(self._chunks):
            if chunk.taken + size <= chunk.stop:
                return chunk
        room = max(_CHUNK, _round_up(size, _LARGE_PAGE))
        mapping = mmap.mmap(-1, room + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        start = _round_up(base, _LARGE_PAGE)
        interleave(start, room, online_nodes())
        if self._is_large:
            _advise(start, room, _HUGEPAGE)
        self._chunks.append(_Chunk(mapping, base, start, start + room, start))
        return self._chunks[-1]


def online_nodes(path: Path = _NODES) -> list[int]:
    """Return the NUMA nodes of this machine, or [0] if `path` does not exist, because the machine has no NUMA.

    path: file with a list of ranges, such as 0-1,4.
    """
    if not path.is_file():
        return [0]
    ends = [part.partition("-")[::2] for part in path.read_text().strip().split(",")]
    return [node for first, last in ends for node in range(int(first), int(last or first) + 1)]


def interleave(address: int, size: int, nodes: list[int]) -> bool:
    """Distribute the pages of unused memory over several NUMA nodes, so that a step reads from all nodes at once.

    Return False if there is only one node, or if the kernel rejects the call.
    """
    number = _MBIND.get(os.uname().machine)
    if len(nodes) < 2 or number is None:
        return False
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_int(_INTERLEAVE), mask)
    result: int = _LIBC.syscall(ctypes.c_long(number), *arguments, ctypes.c_ulong(64 * _MASK_WORDS), ctypes.c_uint(0))
    return result == 0


def _join_pages(parts: list[tuple[weakref.ref[mmap.mmap], int, int]]) -> None:
    for part, start, stop in parts:
        for address in range(start, stop - _LARGE_PAGE + 1, _LARGE_PAGE):
            mapping = part()
            if mapping is None:
                break  # the weights have been released
            begun = time.perf_counter()
            _advise(address, _LARGE_PAGE, _HUGEPAGE)
            if _advise(address, _LARGE_PAGE, _COLLAPSE) == errno.EINVAL:
                return  # Linux before 6.1, or a kernel without large pages
            took = time.perf_counter() - begun
            del mapping
            time.sleep(_REST * took)


def _advise(address: int, size: int, advice: int) -> int:
    """Call madvise(2) without the interpreter lock. Return 0 or the error number."""
    done = _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if done != 0 else 0


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to
