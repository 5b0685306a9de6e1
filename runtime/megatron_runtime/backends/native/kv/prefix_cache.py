"""The prefix cache. It allocates the pages of the KV cache, and lets requests with equal prefixes share pages.

A usable page is free, owned by one or more requests or transfers, or idle (cached without an owner). The last page is
not usable: it is the dummy page, whose id fills the unused entries of block tables. It never has an owner.

A block is `pages_per_block` pages with the KV of one complete block of prompt tokens. Its key is a digest over its
tokens and all tokens before them, so equal keys mean equal KV. A request that holds a block also holds all blocks
before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_runtime.engine.backend import CacheEvents
from megatron_runtime.requests.config import PrefixCachingEvictionPolicy

Pages = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlock:
    """A complete block in the prefix cache."""

    key: bytes
    pages: Pages

    @property
    def id(self) -> int:
        """The block's id, which is its first page."""
        return int(self.pages[0])


class PrefixCache:
    """The allocator of the page ids 0 … num_pages − 2, and the index of complete blocks by key.

    The page that was released last is allocated first. The policy REF_ZERO evicts a block as soon as it has no owner.
    The policy LRU evicts blocks when pages are needed, and starts with the block that has been idle the longest. LRU
    never evicts a block with an owner, or a block before its continuations.

    references: int32 [num_pages]; number of owners of each page. All pages of a block have the same owners.
    is_cached:  bool [num_pages]; whether the page belongs to a cached block. Such a page without an owner is idle, not
                free.
    num_usable: number of all pages except the dummy page.
    num_free:   number of pages that have no owner and belong to no cached block.
    num_idle:   number of pages that have no owner but belong to a cached block.
    """

    def __init__(self, num_pages: int, policy: PrefixCachingEvictionPolicy, *, pages_per_block: int = 1) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: want at least 2 (one is a dummy); give more kv_cache_memory")
        self.dummy = self.num_usable = self.num_free = num_pages - 1
        self.pages_per_block = pages_per_block
        self.references = np.zeros(num_pages, dtype=np.int32)
        self.is_cached = np.zeros(num_pages, dtype=bool)
        self._free = np.arange(self.num_usable, dtype=np.int32)[::-1].copy()
        self._policy = policy
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_id: dict[int, CachedBlock] = {}
        self._idle: OrderedDict[int, CachedBlock] = OrderedDict()
        """Idle blocks by id, in the order of eviction.

        A continuation comes before the blocks that it continues. Requests release a continuation no later than these
        blocks, and release() adds the blocks of one request in reverse order.
        """
        self._stored: list[bytes] = []
        self._evicted: list[bytes] = []
        self._has_cleared = False

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    @property
    def num_idle(self) -> int:
        return len(self._idle) * self.pages_per_block

    @property
    def num_held(self) -> int:
        """Number of pages that have an owner. A shared page is counted once."""
        return self.num_usable - self.num_free - self.num_idle

    def find(self, keys: Sequence[bytes]) -> list[CachedBlock]:
        """Return the cached blocks of the longest prefix of `keys` that is completely cached."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_available(self, matched: Sequence[CachedBlock] = ()) -> int:
        """Return the number of pages that allocate() could return if the blocks in `matched` were pinned first."""
        to_pin = sum(block.id in self._idle for block in matched)
        return self.num_free + self.num_idle - to_pin * self.pages_per_block

    def pin(self, blocks: Sequence[CachedBlock]) -> Pages:
        """Add an owner to `blocks`, which find() returned. Return their pages in order."""
        if not blocks:
            return np.empty(0, np.int32)
        for block in blocks:
            self._idle.pop(block.id, None)
        pages = np.concatenate([block.pages for block in blocks])
        self.references[pages] += 1
        return pages

    def allocate(self, count: int) -> Pages | None:
        """Return `count` pages with one owner, and evict idle blocks if needed.

        Return None, and evict nothing, if too few pages are available.
        """
        missing = count - self.num_free
        if missing > self.num_idle:
            return None
        for _ in range(-(-missing // self.pages_per_block)):
            self._evict(self._idle.popitem(last=False)[1])
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.references[pages] = 1
        return pages

    def release(self, pages: Pages) -> None:
        """Remove one owner from each of `pages`. `pages` must be all pages of a request or a transfer, in order."""
        self.references[pages] -= 1
        owners = self.references[pages]
        if (owners < 0).any():
            raise AssertionError(f"pages released more often than held: {pages[owners < 0][:10].tolist()}")
        unowned: Pages = pages[owners == 0]
        is_cached = self.is_cached[unowned]
        self._free_pages(unowned[~is_cached])
        for page in reversed(unowned[is_cached].tolist()):
            block = self._by_id.get(page)
            if block is None:
                continue
            if self._policy is PrefixCachingEvictionPolicy.REF_ZERO:
                self._evict(block)
            else:
                self._idle[page] = block

    def register(self, key: bytes, pages: Pages) -> bool:
        """Cache a computed block. The caller must hold `pages` and all blocks before this block.

        Return True if the block is now cached. Return False, and change nothing, if a block with this key is already
        cached.
        """
        known = self._by_key.get(key)
        if known is not None:
            return known.id == pages[0]
        owner = self._by_id.get(int(pages[0]))
        if owner is not None:
            raise AssertionError(f"page {owner.id} holds block {owner.key.hex()[:16]}: it cannot hold another")
        block = CachedBlock(key, pages.copy())
        self._by_key[key] = self._by_id[block.id] = block
        self.is_cached[block.pages] = True
        self._stored.append(key)
        return True

    def clear(self) -> None:
        """Evict all blocks because the weights have changed. Pages that have an owner stay allocated to that owner."""
        for block in self._idle.values():
            self._free_pages(block.pages)
        self.is_cached[:] = False
        self._by_key.clear()
        self._by_id.clear()
        self._idle.clear()
        self._stored, self._evicted, self._has_cleared = [], [], True

    def take_events(self) -> CacheEvents:
        """Return the changes since the last call.

        The first list has the keys that were stored and are still cached. The second list has the keys that were
        evicted and are not cached again.
        """
        events = CacheEvents(
            stored=[key for key in dict.fromkeys(self._stored) if key in self],
            evicted=[key for key in dict.fromkeys(self._evicted) if key not in self],
            cleared=self._has_cleared,
        )
        self._stored, self._evicted, self._has_cleared = [], [], False
        return events

    def _evict(self, block: CachedBlock) -> None:
        """Remove a block that has no owner, and free its pages."""
        del self._by_key[block.key]
        del self._by_id[block.id]
        self.is_cached[block.pages] = False
        self._free_pages(block.pages)
        self._evicted.append(block.key)

    def _free_pages(self, pages: Pages) -> None:
        end = self.num_free + len(pages)
        self._free[self.num_free : end] = pages[::-1]
        self.num_free = end

    def check_integrity(self, held: Pages) -> None:
        """Check that pages, blocks and counts agree with each other and with `held`, which lists a page once per owner.

        Raises AssertionError.
        """
        num_pages = len(self.references)
        owners = np.bincount(held, minlength=num_pages)
        wrong = np.flatnonzero(owners != self.references)
        if len(wrong):
            raise AssertionError(
                f"pages {wrong[:10].tolist()} have {owners[wrong[:10]]} owners, counted {self.references[wrong[:10]]}"
            )
        free = np.bincount(self._free[: self.num_free], minlength=num_pages)
        states = free + (self.is_cached & (owners == 0)) + (owners > 0)
        wrong = np.flatnonzero(states[: self.num_usable] != 1)
        if len(wrong) or states[self.dummy]:
            raise AssertionError(f"pages neither free nor held nor idle, or more than one: {wrong[:10].tolist()}")
        cached = np.zeros(num_pages, dtype=int)
        idle = set()
        for key, block in self._by_key.items():
            if block.key != key or self._by_id.get(block.id) is not block:
                raise AssertionError(f"block {block.id} is not indexed under its own key and id")
            cached[block.pages] += 1
            of_block = owners[block.pages]
            if len(block.pages) != self.pages_per_block or of_block.min() != of_block.max():
                raise AssertionError(f"pages of block {block.id} do not share their owners: {of_block.tolist()}")
            if of_block[0] == 0:
                idle.add(block.id)
        if idle != set(self._idle) or (idle and self._policy is PrefixCachingEvictionPolicy.REF_ZERO):
            raise AssertionError(f"blocks {sorted(idle)} have no owner, {sorted(self._idle)} can be evicted")
        if (cached != self.is_cached).any() or len(self._by_id) != len(self._by_key):
            raise AssertionError("cached pages are not those of the cached blocks, each of one block")
