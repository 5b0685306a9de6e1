"""Pages of the KV cache: who holds which. The last page is a dummy that padding points at and nobody owns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class BlockAllocator:
    """A last-in-first-out bag of page ids 0 … num_pages − 2; page num_pages − 1 is the dummy."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: want at least 2 (one is a dummy); give more kv_cache_memory")
        self.num_pages = num_pages
        self._free = np.arange(num_pages - 1, dtype=np.int32)[::-1].copy()
        self._num_free = num_pages - 1

    @property
    def dummy(self) -> int:
        return self.num_pages - 1

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> npt.NDArray[np.int32] | None:
        """`count` pages, or None and nothing taken when there are too few."""
        if count > self._num_free:
            return None
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def release(self, pages: npt.NDArray[np.int32]) -> None:
        """Give pages back; each must be held exactly once."""
        end = self._num_free + len(pages)
        if end > self.num_usable:
            raise AssertionError(f"released {len(pages)} pages with {self._num_free} of {self.num_usable} free")
        self._free[self._num_free : end] = pages[::-1]
        self._num_free = end

    def check_integrity(self, held: npt.NDArray[np.int32]) -> None:
        """Free and held pages are each usable page exactly once. Raises AssertionError with the difference."""
        seen = np.concatenate([self._free[: self._num_free], held])
        counts = np.bincount(seen, minlength=self.num_pages)
        wrong = np.flatnonzero(counts[: self.num_usable] != 1)
        if len(wrong) or counts[self.dummy]:
            raise AssertionError(f"pages not held exactly once: {wrong[:10].tolist()} (counts {counts[wrong[:10]]})")
