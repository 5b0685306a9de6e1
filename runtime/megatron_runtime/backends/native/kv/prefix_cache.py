"""Pages of the KV cache: their owners, and the prefixes they hold, so that requests with equal prefixes share them.

A usable page is free, held (by one owner or more), or idle: kept for the prefix cache while no request holds it. The
last page is the dummy page: padding refers to it, and it has no owner.

A block is `pages_per_block` pages with the KV of one complete block of prompt tokens. Its key is the digest of its
tokens and all tokens before them, so equal keys mean equal KV. A request that holds a block holds all blocks before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_runtime.requests.config import PrefixCachingEvictionPolicy

Pages = npt.NDArray[np.int32]


class BlockAllocator:
    """Allocates the page ids 0 … num_pages − 2, last in, first out; page num_pages − 1 is the dummy page.

    references: int32 [num_pages]; owners of each page.
    kept:       bool [num_pages]; pages that do not become free when their last owner releases them.
    num_usable, num_free, num_idle: counts of pages.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: want at least 2 (one is a dummy); give more kv_cache_memory")
        self.num_pages = num_pages
        self.dummy = self.num_usable = self.num_free = num_pages - 1
        self.num_idle = 0
        self.references = np.zeros(num_pages, dtype=np.int32)
        self.kept = np.zeros(num_pages, dtype=bool)
        self._free = np.arange(self.num_usable, dtype=np.int32)[::-1].copy()

    @property
    def num_held(self) -> int:
        """Pages with an owner, each counted once."""
        return self.num_usable - self.num_free - self.num_idle

    def allocate(self, count: int) -> Pages | None:
        """Return `count` free pages, each with one owner; None, and take no page, if there are too few."""
        if count > self.num_free:
            return None
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.references[pages] = 1
        return pages

    def pin(self, pages: Pages) -> None:
        """Add an owner to each of `pages`, which must be distinct and held or idle."""
        self.num_idle -= int((self.references[pages] == 0).sum())
        self.references[pages] += 1

    def release(self, pages: Pages) -> Pages:
        """Remove an owner for each entry of `pages`. Return the pages left without an owner, each once, in order."""
        np.subtract.at(self.references, pages, 1)
        unowned: Pages = pages[self.references[pages] <= 0]
        if not len(unowned):
            return unowned
        if int(self.references[unowned].min()) < 0:
            raise AssertionError(f"pages released more often than held: {unowned[:10].tolist()}")
        if len(unowned) > 1:
            unowned = unowned[np.sort(np.unique(unowned, return_index=True)[1])]
        idle = self.kept[unowned]
        self.num_idle += int(idle.sum())
        self._free_pages(unowned[~idle])
        return unowned

    def keep(self, pages: Pages) -> None:
        """Make these held pages idle, not free, when their last owner releases them."""
        self.kept[pages] = True

    def unkeep(self, pages: Pages) -> None:
        """Undo keep(); idle pages become free."""
        idle = pages[self.kept[pages] & (self.references[pages] == 0)]
        self.kept[pages] = False
        self.num_idle -= len(idle)
        self._free_pages(idle)

    def _free_pages(self, pages: Pages) -> None:
        end = self.num_free + len(pages)
        self._free[self.num_free : end] = pages[::-1]
        self.num_free = end

    def check_integrity(self, held: Pages) -> None:
        """Compare the counts with `held`, which has each page once for each owner. Raises AssertionError."""
        owners = np.bincount(held, minlength=self.num_pages)
        wrong = np.flatnonzero(owners != self.references)
        if len(wrong):
            raise AssertionError(
                f"pages {wrong[:10].tolist()} have {owners[wrong[:10]]} owners, counted {self.references[wrong[:10]]}"
            )
        free = np.zeros(self.num_pages, dtype=int)
        np.add.at(free, self._free[: self.num_free], 1)
        idle = self.kept & (self.references == 0)
        states = free + idle + (self.references > 0)
        wrong = np.flatnonzero(states[: self.num_usable] != 1)
        if len(wrong) or states[self.dummy]:
            raise AssertionError(f"pages neither free nor held nor idle, or more than one: {wrong[:10].tolist()}")
        if int(idle.sum()) != self.num_idle:
            raise AssertionError(f"{int(idle.sum())} pages are idle, counted {self.num_idle}")


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlock:
    """A complete block in the prefix cache."""

    key: bytes
    pages: Pages

    @property
    def id(self) -> int:
        """The first page."""
        return int(self.pages[0])


@dataclass(slots=True)
class BlockEvents:
    """Changes of the prefix cache since the last report.

    stored:  keys that were cached and still are.
    evicted: keys that were evicted and are not cached again.
    cleared: all keys from before the last report were evicted.
    """

    stored: list[bytes] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)
    cleared: bool = False

    def __bool__(self) -> bool:
        return self.cleared or bool(self.stored) or bool(self.evicted)


class PrefixCache:
    """Allocates the pages of `allocator`, and finds complete blocks by their keys.

    A block without an owner is evicted at once (REF_ZERO), or when its pages are needed (LRU). LRU evicts the block
    that has been idle for longest, never a block with an owner, and never a block before its continuations.
    """

    def __init__(self, allocator: BlockAllocator, policy: PrefixCachingEvictionPolicy, *, pages_per_block: int) -> None:
        self.allocator = allocator
        self.pages_per_block = pages_per_block
        self._policy = policy
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_id: dict[int, CachedBlock] = {}
        self._idle: OrderedDict[int, CachedBlock] = OrderedDict()
        """Idle blocks by id, in the order of eviction. A continuation comes before the blocks that it continues:
        requests release it no later than these, and release() adds the blocks of one request in reverse."""
        self._events = BlockEvents()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def find(self, keys: Sequence[bytes]) -> list[CachedBlock]:
        """Return the blocks of the longest prefix of `keys` that is cached."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_available(self, matched: Sequence[CachedBlock] = ()) -> int:
        """Return how many pages allocate() can return once `matched` are pinned."""
        allocator = self.allocator
        to_pin = sum(int(allocator.references[block.id]) == 0 for block in matched)
        return allocator.num_free + allocator.num_idle - to_pin * self.pages_per_block

    def pin(self, blocks: Sequence[CachedBlock]) -> Pages:
        """Add an owner to `blocks`, as find() returned them. Return their pages in order."""
        if not blocks:
            return np.empty(0, np.int32)
        for block in blocks:
            self._idle.pop(block.id, None)
        pages = np.concatenate([block.pages for block in blocks])
        self.allocator.pin(pages)
        return pages

    def allocate(self, count: int) -> Pages | None:
        """Return `count` pages, evicting idle blocks as needed; None, and evict nothing, if there are too few."""
        missing = count - self.allocator.num_free
        if missing > self.allocator.num_idle:
            return None
        for _ in range(-(-missing // self.pages_per_block)):
            self._evict(self._idle.popitem(last=False)[1])
        return self.allocator.allocate(count)

    def release(self, pages: Pages) -> None:
        """Release pages that pin() or allocate() returned: all those of a request, in order."""
        for page in reversed(self.allocator.release(pages).tolist()):
            block = self._by_id.get(page)
            if block is None:
                continue
            if self._policy is PrefixCachingEvictionPolicy.REF_ZERO:
                self._evict(block)
            else:
                self._idle[page] = block

    def register(self, key: bytes, pages: Pages) -> bool:
        """Cache a computed block; the caller holds `pages`, and the blocks before. False if `key` has other pages."""
        known = self._by_key.get(key)
        if known is not None:
            return known.id == pages[0]
        owner = self._by_id.get(int(pages[0]))
        if owner is not None:
            raise AssertionError(f"page {owner.id} holds block {owner.key.hex()[:16]}: it cannot hold another")
        block = CachedBlock(key, pages.copy())
        self._by_key[key] = self._by_id[block.id] = block
        self.allocator.keep(block.pages)
        self._events.stored.append(key)
        return True

    def clear(self) -> None:
        """Evict all blocks, as after a change of weights. Held pages stay held."""
        for block in self._by_key.values():
            self.allocator.unkeep(block.pages)
        self._by_key.clear()
        self._by_id.clear()
        self._idle.clear()
        self._events = BlockEvents(cleared=True)

    def take_events(self) -> BlockEvents:
        """Return the changes since the last call."""
        events, self._events = self._events, BlockEvents()
        if events:
            events.stored = [key for key in dict.fromkeys(events.stored) if key in self]
            events.evicted = [key for key in dict.fromkeys(events.evicted) if key not in self]
        return events

    def _evict(self, block: CachedBlock) -> None:
        del self._by_key[block.key]
        del self._by_id[block.id]
        self.allocator.unkeep(block.pages)
        self._events.evicted.append(block.key)

    def check_integrity(self) -> None:
        """Compare the index, the idle blocks and the pages. Raises AssertionError."""
        allocator = self.allocator
        kept = np.zeros(allocator.num_pages, dtype=int)
        idle = set()
        for key, block in self._by_key.items():
            if block.key != key or self._by_id.get(block.id) is not block:
                raise AssertionError(f"block {block.id} is not indexed under its own key and id")
            kept[block.pages] += 1
            owners = allocator.references[block.pages]
            if len(block.pages) != self.pages_per_block or owners.min() != owners.max():
                raise AssertionError(f"pages of block {block.id} do not share their owners: {owners.tolist()}")
            if owners[0] == 0:
                idle.add(block.id)
        if idle != set(self._idle) or (idle and self._policy is PrefixCachingEvictionPolicy.REF_ZERO):
            raise AssertionError(f"blocks {sorted(idle)} have no owner, {sorted(self._idle)} can be evicted")
        if (kept != allocator.kept).any() or len(self._by_id) != len(self._by_key):
            raise AssertionError("kept pages are not those of the cached blocks, each of one block")
