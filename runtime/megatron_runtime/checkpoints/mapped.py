"""A file of tensors, mapped into memory; of what was read only the last pieces stay resident."""

from __future__ import annotations

import mmap
from threading import Lock

import torch

from megatron_runtime.checkpoints.model_files import ModelFile

RESIDENT_BYTES = 16 << 20


class MappedFile:
    """Mapped when first read. Pieces are views of the mapping, which lives as long as any of them. For any thread."""

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        self._view: mmap.mmap | None = None
        self._resident = 0
        self._lock = Lock()

    def piece(self, offset: int, size: int) -> torch.Tensor:
        """uint8 [size] from `offset` on. It must not be written to."""
        with self._lock:
            if self._view is None:
                with self.file.open() as file:
                    # Copy on write only because torch takes no buffer that cannot be written.
                    self._view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._resident += size
            if self._resident > RESIDENT_BYTES and hasattr(self._view, "madvise"):
                # Out of this process, not out of the system's cache: a view that is still used gets its pages again.
                self._view.madvise(mmap.MADV_DONTNEED)
                self._resident = size
            view = self._view
        return torch.frombuffer(view, dtype=torch.uint8, count=size, offset=offset)
