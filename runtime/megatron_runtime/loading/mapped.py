"""A file of tensors, mapped into memory; of what was read only the last piece stays resident."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch


class MappedFile:
    """Mapped when first read. Pieces are views of the mapping, which lives as long as any of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._view: mmap.mmap | None = None
        self._last: tuple[int, int] | None = None

    def piece(self, offset: int, size: int) -> torch.Tensor:
        """uint8 [size] from `offset` on. It must not be written to."""
        if self._view is None:
            with self.path.open("rb") as file:
                # Copy on write only because torch takes no buffer that cannot be written.
                self._view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if self._last is not None:
            self._forget(*self._last)
        self._last = (offset, size)
        return torch.frombuffer(self._view, dtype=torch.uint8, count=size, offset=offset)

    def _forget(self, offset: int, size: int) -> None:
        """Take pages out of this process, not out of the system's cache: a view that is still used gets them again."""
        view = self._view
        if view is not None and hasattr(view, "madvise") and size:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            view.madvise(mmap.MADV_DONTNEED, start, offset + size - start)
