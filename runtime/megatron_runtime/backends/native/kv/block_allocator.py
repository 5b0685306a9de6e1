"""Pages of the KV cache: who holds which. The last page is a dummy that padding points at and nobody owns.

A usable page is free, held (by one owner or more), or idle: kept for the prefix cache while nobody holds it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


class BlockAllocator:
    """A last-in-first-out bag of page ids 0 … num_pages − 2; page num_pages − 1 is the dummy.

    references: int32 [num_pages]; owners of each page.
    kept:       bool [num_pages]; pages that do not become free when their last owner goes.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: want at least 2 (one is a dummy); give more kv_cache_memory")
        self.num_pages = num_pages
        self.references = np.zeros(num_pages, dtype=np.int32)
        self.kept = np.zeros(num_pages, dtype=bool)
        self._free = np.empty(num_pages - 1, dtype=np.int32)
        self.reset()

    def reset(self) -> None:
        """Every page is free, in the order of the beginning."""
        self.references[:] = 0
        self.kept[:] = False
        self._free[:] = np.arange(self.num_usable, dtype=np.int32)[::-1]
        self._num_free = self.num_usable
        self._num_idle = 0

    @property
    def dummy(self) -> int:
        return self.num_pages - 1

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_idle(self) -> int:
        return self._num_idle

    @property
    def num_held(self) -> int:
        """Pages with an owner, each counted once."""
        return self.num_usable - self._num_free - self._num_idle

    def allocate(self, count: int) -> Pages | None:
        """`count` free pages, each with one owner; None, and nothing taken, when there are too few."""
        if count > self._num_free:
            return None
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count][::-1].copy()
        self.references[pages] = 1
        return pages

    def pin(self, pages: Pages) -> None:
        """One more owner for each of `pages`, which are distinct and held or idle."""
        self._num_idle -= int((self.references[pages] == 0).sum())
        self.references[pages] += 1

    def release(self, pages: Pages) -> Pages:
        """One owner less for each entry of `pages`. Returns those that have none any more, each once."""
        np.subtract.at(self.references, pages, 1)
        unowned: Pages = pages[self.references[pages] <= 0]
        if not len(unowned):
            return unowned
        if int(self.references[unowned].min()) < 0:
            raise AssertionError(f"pages released more often than held: {unowned[:10].tolist()}")
        if len(unowned) > 1:
            unowned = unowned[np.sort(np.unique(unowned, return_index=True)[1])]
        idle = self.kept[unowned]
        self._num_idle += int(idle.sum())
        self._give_back(unowned[~idle])
        return unowned

    def keep(self, pages: Pages) -> None:
        """Let held pages stay when their last owner goes."""
        self.kept[pages] = True

    def unkeep(self, pages: Pages) -> None:
        """Undo keep(); idle pages become free."""
        idle = pages[self.kept[pages] & (self.references[pages] == 0)]
        self.kept[pages] = False
        self._num_idle -= len(idle)
        self._give_back(idle)

    def _give_back(self, pages: Pages) -> None:
        end = self._num_free + len(pages)
        self._free[self._num_free : end] = pages[::-1]
        self._num_free = end

    def check_integrity(self, held: Pages) -> None:
        """`held` names each page once for each owner. Raises AssertionError where books and owners differ."""
        owners = np.bincount(held, minlength=self.num_pages)
        wrong = np.flatnonzero(owners != self.references)
        if len(wrong):
            raise AssertionError(
                f"pages {wrong[:10].tolist()} have {owners[wrong[:10]]} owners, counted {self.references[wrong[:10]]}"
            )
        free = np.zeros(self.num_pages, dtype=int)
        np.add.at(free, self._free[: self._num_free], 1)
        idle = self.kept & (self.references == 0)
        states = free + idle + (self.references > 0)
        wrong = np.flatnonzero(states[: self.num_usable] != 1)
        if len(wrong) or states[self.dummy]:
            raise AssertionError(f"pages neither free nor held nor idle, or more than one: {wrong[:10].tolist()}")
        if int(idle.sum()) != self._num_idle:
            raise AssertionError(f"{int(idle.sum())} pages are idle, counted {self._num_idle}")
