"""Prefix-cache blocks that another engine reads or writes. Their pages are pinned during the transfer.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_runtime.backends.native.kv.prefix_cache import Pages, PrefixCache
from megatron_runtime.backends.native.micro_batches import expert_of_pages
from megatron_runtime.engine.kv_transfer import TransferEndedError

EXPORT_SHARE = 4
"""Exports hold at most 1 / EXPORT_SHARE of the usable pages."""


class PinnedTransfers:
    """The exports and imports of one engine, by dispatch id. Each export or import owns its pages, as a request does.

    Imported blocks enter the prefix cache when all blocks of their prompt have arrived. If a request with the same
    prompt starts earlier, it computes the blocks itself.

    expert_size: as in Executor.
    """

    def __init__(self, cache: PrefixCache, *, expert_size: int = 1) -> None:
        self._cache = cache
        self._expert_size = expert_size
        self._exports: dict[int, Pages] = {}
        self._imports: dict[int, tuple[Sequence[bytes], Pages]] = {}
        self._ready: dict[bytes, int] = {}
        """Map from the last key of each complete import to the id of the import."""

    def export(self, transfer: int, keys: Sequence[bytes]) -> list[bytes]:
        """Pin the cached prefix of `keys`, and return the keys of the pinned blocks.

        The prefix is cut if all exports together would exceed the page limit for exports (see EXPORT_SHARE).
        """
        room = self._cache.num_usable // EXPORT_SHARE - sum(map(len, self._exports.values()))
        blocks = self._cache.find(keys)[: max(0, room // self._cache.pages_per_block)]
        if blocks:
            self._exports[transfer] = self._cache.pin(blocks)
        return [block.key for block in blocks]

    def reserve(self, transfer: int, keys: Sequence[bytes]) -> int | None:
        """Begin an import of the blocks with `keys`. Return the number of leading blocks that are cached already.

        Pages are allocated for the other blocks. Return None, and allocate nothing, if too few pages are available.
        """
        cached = self._cache.find(keys)
        missing = (len(keys) - len(cached)) * self._cache.pages_per_block
        if missing > self._cache.num_available(cached):
            return None
        pinned, new = self._cache.pin(cached), self._cache.allocate(missing)
        assert new is not None, "num_available() has counted them"
        self._imports[transfer] = keys, np.concatenate([pinned, new])
        return len(cached)

    def exported(self, transfer: int) -> Pages:
        """Return the pages of an export, int32 [blocks, pages of a block]. Raises KeyError if the export has ended."""
        return self._by_block(self._exports[transfer])

    def reserved(self, transfer: int) -> Pages:
        """Return the pages of an import, int32 [blocks, pages of a block]. Raises KeyError if the import has ended."""
        return self._by_block(self._imports[transfer][1])

    def _by_block(self, pages: Pages) -> Pages:
        return pages.reshape(-1, self._cache.pages_per_block)

    def complete(self, transfer: int) -> None:
        """Add the blocks of an import to the prefix cache, and keep them pinned.

        Raises KeyError if the import has ended. Raises TransferEndedError if another expert rank holds the first block.
        """
        keys, pages = self._imports[transfer]
        first = [int(pages[0]), *(block.id for block in self._cache.find(keys[:1]))]
        if len(set(expert_of_pages(np.array(first), self._expert_size).tolist())) > 1:
            # A request that found both in the cache would run on the rank of its first page, which lacks the rest.
            raise TransferEndedError("a request with the same prompt has started meanwhile, on another expert rank")
        for key, block in zip(keys, self._by_block(pages), strict=True):
            self._cache.register(key, block)  # False if it was computed or imported meanwhile
        self._imports[transfer] = keys, self._cache.pin(self._cache.find(keys))
        self._cache.release(pages)
        self._ready[keys[-1]] = transfer

    def used(self, key: bytes) -> None:
        """Release the import whose last block has the key `key`. No effect if there is none.

        Call this when the engine has admitted a request that pins the imported blocks.
        """
        transfer = self._ready.get(key)
        if transfer is not None:
            self.release(transfer)

    def release(self, transfer: int) -> None:
        """Release the pages of an export or import. An unknown id is ignored."""
        pages = self._exports.pop(transfer, None)
        if transfer in self._imports:
            keys, pages = self._imports.pop(transfer)
            if self._ready.get(keys[-1]) == transfer:
                del self._ready[keys[-1]]
        if pages is not None:
            self._cache.release(pages)

    def clear(self) -> None:
        """Release all exports and imports, because the cache was cleared."""
        for transfer in [*self._exports, *self._imports]:
            self.release(transfer)

    def held(self) -> list[Pages]:
        """Return the pages of each export and import."""
        return [*self._exports.values(), *(pages for _, pages in self._imports.values())]
