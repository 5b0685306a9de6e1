"""The memory that packed weights lie in."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
import time
import weakref
from dataclasses import dataclass

import torch

PAGES_THREAD = "megatron-pages"
"""Which ends when pages are joined."""
_PAGE = 1 << 12
_LARGE_PAGE = 1 << 21
_CHUNK = 1 << 26
_PROVIDED = 1 << 22
_POPULATE_WRITE, _COLLAPSE = 23, 25
"""MADV_POPULATE_WRITE and MADV_COLLAPSE of madvise(2)."""
_REST = 3.0
"""Times as long as it works, the thread that joins pages sleeps."""
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class _Chunk:
    """Part of a mapping. start, stop, taken: addresses; from `taken` on it is free."""

    mapping: mmap.mmap
    base: int
    start: int
    stop: int
    taken: int


class WeightMemory:
    """Of one load: matrices lie one after another in large mappings, which go when the last matrix in them goes.

    Pages come many at once, in two thirds of the time that it takes to touch them one by one. They come as pages of
    4 KiB and are joined to pages of 2 MiB later: on a virtual machine whose host had taken such pages back, to have
    540 MB of them at once took up to 3 s, others 0.3 s. For any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: list[_Chunk] = []

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], at the start of a page, not set to anything."""
        with self._lock:
            chunk = self._chunk_for(size)
            address = chunk.taken
            chunk.taken = min(_round_up(address + size, _PAGE), chunk.stop)
        # In pieces, for other threads may need memory, too.
        for start in range(address, address + size, _PROVIDED):
            if _advise(start, min(_PROVIDED, address + size - start), _POPULATE_WRITE) != 0:
                break  # Linux before 5.14: pages come as they are touched
        return torch.frombuffer(chunk.mapping, dtype=torch.uint8, count=size, offset=address - chunk.base)

    def join_pages(self) -> threading.Thread:
        """Begin to move what was taken into pages of 2 MiB, which a step reads faster: one entry of the processor's
        tables serves 512 times as much. In a thread of its own, which works a quarter of the time; returns it.
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
        self._chunks.append(_Chunk(mapping, base, start, start + room, start))
        return self._chunks[-1]


def _join_pages(parts: list[tuple[weakref.ref[mmap.mmap], int, int]]) -> None:
    for part, start, stop in parts:
        for address in range(start, stop - _LARGE_PAGE + 1, _LARGE_PAGE):
            mapping = part()
            if mapping is None:
                break  # its weights have gone
            begun = time.perf_counter()
            if _advise(address, _LARGE_PAGE, _COLLAPSE) == errno.EINVAL:
                return  # Linux before 6.1, or one without such pages
            took = time.perf_counter() - begun
            del mapping
            time.sleep(_REST * took)


def _advise(address: int, size: int, advice: int) -> int:
    """madvise(2), while other threads run. Returns 0 or the error's number."""
    done = _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if done != 0 else 0


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to
