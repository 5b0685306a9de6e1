"""Maps files of tensors into memory, and limits the number of resident pages."""

from __future__ import annotations

import mmap
from threading import Lock

import torch

from megatron_runtime.checkpoints.model_files import ModelFile

RESIDENT_BYTES = 16 << 20


class MappedFile:
    """A file that is mapped into memory at the first call of piece().

    The tensors that piece() returns are views of the mapping, and keep it alive. Thread-safe.
    """

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        self._view: mmap.mmap | None = None
        self._resident = 0
        self._lock = Lock()

    def piece(self, offset: int, size: int) -> torch.Tensor:
        """Return `size` bytes from `offset` on, as uint8 [size]. Callers must not write to the tensor."""
        with self._lock:
            if self._view is None:
                with self.file.open() as file:
                    # The mapping is copy-on-write because torch accepts no read-only buffer.
                    self._view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._resident += size
            if self._resident > RESIDENT_BYTES and hasattr(self._view, "madvise"):
                # This drops pages from the process, but not from the page cache. A view in use maps them again.
                self._view.madvise(mmap.MADV_DONTNEED)
                self._resident = size
            view = self._view
        return torch.frombuffer(view, dtype=torch.uint8, count=size, offset=offset)
