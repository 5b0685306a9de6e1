"""Pages of the KV cache: their owners, and the prefixes they hold, so that requests with equal prefixes share them.

A usable page is free, held (by one owner or more), or idle: kept for the prefix cache while no request holds it. The
last page is a dummy: padding points at it, and it has no owner.

A block is `pages_per_block` pages with the KV of one complete block of prompt tokens. Its key is the digest of its
tokens and all before them, so equal keys mean equal KV. A request that holds a block holds all blocks before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_runtime.requests.config import PrefixCachingEvictionPolicy

Pages = npt.NDArray[np.int32]


class BlockAllocator:
    """A last-in-first-out bag of page ids 0 … num_pages − 2; page num_pages − 1 is the dummy.

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
        """`count` free pages, each with one owner; None, and no page taken, if there are too few."""
        if count > self.num_free:
            return None
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.references[pages] = 1
        return pages

    def pin(self, pages: Pages) -> None:
        """Add an owner to each of `pages`, which are distinct and held or idle."""
        self.num_idle -= int((self.references[pages] == 0).sum())
        self.references[pages] += 1

    def release(self, pages: Pages) -> Pages:
        """Remove an owner for each entry of `pages`. Returns the pages without an owner, each once."""
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
        """Make held pages idle, not free, when their last owner releases them."""
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
        """`held` names each page once for each owner. Raises AssertionError if the counts differ."""
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


@dataclass(slots=True, eq=False)
class CachedBlock:
    """children: blocks that continue this one. last_used: ticks of the cache, not seconds."""

    key: bytes
    pages: Pages
    parent: CachedBlock | None
    children: int = 0
    last_used: int = 0

    @property
    def id(self) -> int:
        return int(self.pages[0])


@dataclass(slots=True)
class BlockEvents:
    """Keys that were cached and still are, and keys that were evicted. `cleared`: all earlier keys were evicted."""

    stored: list[bytes] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)
    cleared: bool = False

    def __bool__(self) -> bool:
        return self.cleared or bool(self.stored) or bool(self.evicted)


class PrefixCache:
    """Allocates the pages of `allocator`, and finds complete blocks by their keys.

    A block without an owner is evicted at once (REF_ZERO), or when its pages are needed (LRU). LRU evicts the least
    recently used leaf first, never a block before its continuations, and never a block with an owner.
    """

    def __init__(self, allocator: BlockAllocator, policy: PrefixCachingEvictionPolicy, *, pages_per_block: int) -> None:
        self.allocator = allocator
        self.pages_per_block = pages_per_block
        self._policy = policy
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_id: dict[int, CachedBlock] = {}
        self._leaves: list[tuple[int, int]] = []
        """(last_used, id) of idle leaves; outdated entries are skipped."""
        self._clock = 0
        self._events = BlockEvents()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def find(self, keys: Sequence[bytes]) -> list[CachedBlock]:
        """Blocks of the longest prefix of `keys` that is cached."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_available(self, matched: Sequence[CachedBlock] = ()) -> int:
        """Pages that allocate() can return once `matched` are pinned."""
        allocator = self.allocator
        to_pin = sum(int(allocator.references[block.id]) == 0 for block in matched)
        return allocator.num_free + allocator.num_idle - to_pin * self.pages_per_block

    def pin(self, blocks: Sequence[CachedBlock]) -> Pages:
        """Add an owner to `blocks`, as find() returned them. Returns their pages in order."""
        if not blocks:
            return np.empty(0, np.int32)
        pages = np.concatenate([block.pages for block in blocks])
        self.allocator.pin(pages)
        return pages

    def allocate(self, count: int) -> Pages | None:
        """`count` pages, evicting idle blocks as needed; None, and nothing evicted, if there are too few."""
        missing = count - self.allocator.num_free
        if missing > 0 and not self._evict(missing):
            return None
        return self.allocator.allocate(count)

    def release(self, pages: Pages) -> None:
        """Release pages that pin() or allocate() returned."""
        self._clock += 1
        unowned = self.allocator.release(pages).tolist()
        for block in [self._by_id[page] for page in unowned if page in self._by_id]:
            block.last_used = self._clock
            if self._policy is PrefixCachingEvictionPolicy.REF_ZERO:
                self._evict_block(block)
            elif block.children == 0:
                self._push(block)

    def register(self, key: bytes, pages: Pages, parent: CachedBlock | None) -> CachedBlock | None:
        """Cache a computed block; the caller holds `pages` and `parent`. None if `key` has other pages."""
        known = self._by_key.get(key)
        if known is not None:
            return known if known.id == pages[0] else None
        owner = self._by_id.get(int(pages[0]))
        if owner is not None:
            raise AssertionError(f"page {owner.id} holds block {owner.key.hex()[:16]}: it cannot hold another")
        self._clock += 1
        block = CachedBlock(key, pages.copy(), parent, last_used=self._clock)
        if parent is not None:
            parent.children += 1
        self._by_key[key] = self._by_id[block.id] = block
        self.allocator.keep(block.pages)
        self._events.stored.append(key)
        return block

    def clear(self) -> None:
        """Evict everything, as after a change of weights. Held pages stay held."""
        for block in self._by_key.values():
            self.allocator.unkeep(block.pages)
        self._by_key.clear()
        self._by_id.clear()
        self._leaves.clear()
        self._events = BlockEvents(cleared=True)

    def take_events(self) -> BlockEvents:
        """Changes since the last call."""
        events, self._events = self._events, BlockEvents()
        if events:
            events.stored = [key for key in dict.fromkeys(events.stored) if key in self]
            events.evicted = [key for key in dict.fromkeys(events.evicted) if key not in self]
        return events

    def _push(self, block: CachedBlock) -> None:
        heapq.heappush(self._leaves, (block.last_used, block.id))
        if len(self._leaves) > 64 + 2 * len(self._by_id):
            self._leaves = sorted({entry for entry in self._leaves if self._is_idle_leaf(*entry)})

    def _is_idle_leaf(self, last_used: int, block_id: int) -> bool:
        block = self._by_id.get(block_id)
        return (
            block is not None
            and block.last_used == last_used
            and block.children == 0
            and self.allocator.references[block_id] == 0
        )

    def _evict(self, pages: int) -> bool:
        if self.allocator.num_idle < pages:
            return False
        while pages > 0:
            entry = heapq.heappop(self._leaves)
            if self._is_idle_leaf(*entry):
                self._evict_block(self._by_id[entry[1]])
                pages -= self.pages_per_block
        return True

    def _evict_block(self, block: CachedBlock) -> None:
        del self._by_key[block.key]
        del self._by_id[block.id]
        self.allocator.unkeep(block.pages)
        self._events.evicted.append(block.key)
        parent = block.parent
        if parent is not None:
            parent.children -= 1
            if parent.children == 0 and self.allocator.references[parent.id] == 0:
                self._push(parent)

    def check_integrity(self) -> None:
        """Index, tree and pages agree. Raises AssertionError."""
        allocator = self.allocator
        children: dict[bytes, int] = {}
        kept = np.zeros(allocator.num_pages, dtype=int)
        leaves = set(self._leaves)
        for key, block in self._by_key.items():
            if block.key != key or self._by_id.get(block.id) is not block:
                raise AssertionError(f"block {block.id} is not indexed under its own key and id")
            kept[block.pages] += 1
            owners = allocator.references[block.pages]
            if len(block.pages) != self.pages_per_block or owners.min() != owners.max():
                raise AssertionError(f"pages of block {block.id} do not share their owners: {owners.tolist()}")
            parent = block.parent
            if parent is not None:
                if self._by_key.get(parent.key) is not parent:
                    raise AssertionError(f"block {block.id} outlived block {parent.id} before it")
                if allocator.references[parent.id] < owners[0]:
                    raise AssertionError(f"block {block.id} is held more often than block {parent.id} before it")
                children[parent.key] = children.get(parent.key, 0) + 1
            if owners[0] == 0 and self._policy is PrefixCachingEvictionPolicy.REF_ZERO:
                raise AssertionError(f"block {block.id} is kept though it has no owner")
            if owners[0] == 0 and block.children == 0 and (block.last_used, block.id) not in leaves:
                raise AssertionError(f"idle leaf {block.id} cannot be found for eviction")
        if (kept != allocator.kept).any() or len(self._by_id) != len(self._by_key):
            raise AssertionError("kept pages are not those of the cached blocks, each of one block")
        if any(block.children != children.get(block.key, 0) for block in self._by_key.values()):
            raise AssertionError("a block counts continuations that there are not")
