"""The tokens, parameters and pages of the requests that hold a slot, in columns indexed by slot.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_runtime.backends.native.admission import CoreRequest
from megatron_runtime.backends.native.kv.prefix_cache import CachedBlock, PrefixCache
from megatron_runtime.backends.native.kv.transfers import PinnedTransfers
from megatron_runtime.requests.config import InferenceConfig, InvalidConfigError
from megatron_runtime.sampling.batch import SamplingColumns

Slots = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Routing = npt.NDArray[Any]


@dataclass(slots=True)
class _Chain:
    """The complete prompt blocks of a slot.

    keys:       prefix-cache keys of all blocks that will be cached.
    num_cached: number of leading blocks that are cached already.
    """

    keys: list[bytes]
    num_cached: int

    def missing(self) -> list[bytes]:
        return self.keys[self.num_cached :]


class RecordedRouting:
    """The experts that computed each token in the KV cache, indexed by cache slot, if the engine records them.

    Requests that share KV share these records. SUSPEND does not discard the records.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._shape = num_pages, page_size
        self._of_pages: Routing | None = None
        """Shape [pages, page_size, layers with experts, experts of a token]; None before the first record."""

    def record(self, cache_slots: npt.NDArray[np.int64], routing: Routing) -> None:
        """Store the experts of a step's tokens. cache_slots: int64 [T], as StepPlan.slot_mapping."""
        if self._of_pages is None:
            self._of_pages = np.empty((*self._shape, *routing.shape[1:]), dtype=routing.dtype)
        page_size = self._shape[1]
        self._of_pages[cache_slots // page_size, cache_slots % page_size] = routing

    def of_tokens(self, pages: npt.NDArray[np.int32], count: int) -> Routing | None:
        """Return the experts of the first `count` tokens in `pages`; None if experts are not recorded."""
        if self._of_pages is None:
            return None
        return self._of_pages[pages].reshape(-1, *self._of_pages.shape[2:])[:count]


class RequestSlots:
    """The state of the admitted requests, in arrays indexed by slot.

    A request gets a slot at admission. Slot and pages are freed when the request ends or is preempted.

    tokens:       int32 [slots, max_sequence_length]; prompt, then generated tokens.
    num_tokens:   int32 [slots]; number of tokens in `tokens`.
    num_computed: int32 [slots]; number of tokens whose KV is in the KV cache.
    num_pages:    int32 [slots]; number of pages that the slot holds.
    is_long:      int32 [slots]; 1 if the request may become longer than the model's `short_length`.
    samples:      bool [slots]; False for a request that only computes its prompt and samples no token.
    block_tables: int32 [slots, pages per sequence]; the slot's pages, padded with the dummy page.

    A block is `block_size_tokens` tokens of a prompt. Requests share KV in units of blocks.
    """

    def __init__(
        self,
        config: InferenceConfig,
        *,
        max_sequence_length: int,
        page_size: int,
        num_pages: int,
        expert_size: int = 1,
    ) -> None:
        self.page_size = page_size
        self.block_size = config.block_size_tokens
        self.max_requests = slots = config.request_slots
        if config.enable_prefix_caching and self.block_size % page_size:
            raise InvalidConfigError(
                "block_size_tokens", self.block_size, f"want a multiple of {page_size}, the tokens of a KV page"
            )
        self.prefix_cache = PrefixCache(
            num_pages, config.prefix_caching_eviction_policy, pages_per_block=max(1, self.block_size // page_size)
        )
        self.transfers = PinnedTransfers(self.prefix_cache, expert_size=expert_size)
        self.max_sequence_length = min(max_sequence_length, self.prefix_cache.num_usable * page_size)
        pages = -(-self.max_sequence_length // page_size)
        self.tokens = np.zeros((slots, self.max_sequence_length), dtype=np.int32)
        self.num_tokens = np.zeros(slots, dtype=np.int32)
        self.num_computed = np.zeros(slots, dtype=np.int32)
        self.num_pages = np.zeros(slots, dtype=np.int32)
        self.prompt_length = np.zeros(slots, dtype=np.int32)
        self.is_long = np.zeros(slots, dtype=np.int32)
        self.samples = np.ones(slots, dtype=bool)
        self.block_tables = np.full((slots, pages), self.prefix_cache.dummy, dtype=np.int32)
        self.sampling = SamplingColumns(slots)
        self.routing = RecordedRouting(num_pages, page_size)
        self._free_slots = list(range(slots))[::-1]
        self._chains: dict[int, _Chain] = {}
        self._computing: dict[bytes, int] = {}
        """The slot that will compute a block, by the block's key."""

    # --- slots --------------------------------------------------------------------------------------------------

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def usage(self) -> float:
        """Fraction of the usable pages that requests hold, 0 to 1; a shared page is counted once."""
        return self.prefix_cache.num_held / self.prefix_cache.num_usable

    def taken_slots(self) -> list[int]:
        return sorted(self._chains)

    def tokens_left(self, slots: Slots) -> Int32:
        """Return, for each slot, the number of tokens that are not in the KV cache yet."""
        left: Int32 = self.num_tokens[slots] - self.num_computed[slots]
        return left

    def tokens_of(self, slot: int) -> Int32:
        tokens: Int32 = self.tokens[slot, : self.num_tokens[slot]]
        return tokens

    def routing_of(self, slot: int) -> Routing | None:
        """Return the experts that ran the tokens whose KV the slot has; None if experts are not recorded."""
        return self.routing.of_tokens(self.block_tables[slot, : self.num_pages[slot]], self.num_computed[slot])

    def admit(self, request: CoreRequest, matched: Sequence[CachedBlock]) -> int:
        """Assign a slot to the request, with pages for all its tokens. Return the slot.

        The caller must have called has_room().

        matched: the cached blocks that match() returned. Their pages become the request's first pages.
        """
        tokens = request.tokens
        shared = self.prefix_cache.pin(matched)
        if matched:
            self.transfers.used(matched[-1].key)
        new = self.prefix_cache.allocate(-(-len(tokens) // self.page_size) - len(shared))
        assert new is not None, "has_room() has counted the pages"
        slot = self._free_slots.pop()
        pages = np.concatenate([shared, new])
        self.block_tables[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)
        self.tokens[slot, : len(tokens)] = tokens
        self.num_tokens[slot] = len(tokens)
        self.num_computed[slot] = len(matched) * self.block_size
        self.prompt_length[slot] = request.prompt_length
        self.is_long[slot] = request.is_long
        self.samples[slot] = not request.request.prefill_only
        self.sampling.admit(
            slot,
            request.params,
            seed=request.request.seed,
            prompt=tokens[: request.prompt_length],
            generated=tokens[request.prompt_length :],
            stop_ids=request.stop_ids,
            bad_words=request.request.bad_words or (),
            grammar=request.grammar,
        )
        self._chains[slot] = chain = _Chain(request.digests, len(matched))
        for digest in chain.missing():
            if digest not in self.prefix_cache:
                self._computing.setdefault(digest, slot)
        return slot

    def has_room(
        self, request: CoreRequest, matched: Sequence[CachedBlock], *, without: Slots, spare_pages: int
    ) -> bool:
        """Return whether admit() would accept `request` if the slots `without` were released.

        spare_pages: number of pages that must stay free.
        """
        available = self.prefix_cache.num_available(matched)
        if len(without):
            pages, owners = np.unique(
                np.concatenate([self.block_tables[slot, : self.num_pages[slot]] for slot in without]),
                return_counts=True,
            )
            freed = pages[self.prefix_cache.references[pages] == owners]
            # If only these slots hold a matched block, their release frees no page. `request` pins the block, or
            # computes it again after its eviction.
            kept = [block.pages for block in matched]
            available += len(np.setdiff1d(freed, np.concatenate(kept)) if kept else freed)
        elif not self._free_slots:
            return False
        needed = -(-len(request.tokens) // self.page_size) - len(matched) * self.prefix_cache.pages_per_block
        return needed + spare_pages <= available

    def short_of_pages(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Return the indices in `slots` of the slots that lack a page for their newest token."""
        return np.flatnonzero(self.num_tokens[slots] > self.num_pages[slots] * self.page_size)

    def grow(self, slot: int) -> bool:
        """Add a page to `slot`. Return False, and change nothing, if no page is available."""
        page = self.prefix_cache.allocate(1)
        if page is None:
            return False
        self.block_tables[slot, self.num_pages[slot]] = page[0]
        self.num_pages[slot] += 1
        return True

    def append(self, slots: Slots, tokens: Int32) -> None:
        """Append a generated token to each of `slots`. tokens: one token per slot."""
        self.tokens[slots, self.num_tokens[slots]] = tokens
        self.num_tokens[slots] += 1
        self.sampling.append(slots, tokens)

    def release(self, slot: int) -> None:
        """Free the slot and release its pages."""
        held = int(self.num_pages[slot])
        self._stop_computing(slot)
        del self._chains[slot]
        self.sampling.release(slot)
        self.prefix_cache.release(self.block_tables[slot, :held].copy())
        self.block_tables[slot, :held] = self.prefix_cache.dummy
        self.num_pages[slot] = 0
        self.num_computed[slot] = 0
        self.num_tokens[slot] = 0
        self._free_slots.append(slot)

    # --- prefix cache -------------------------------------------------------------------------------------------

    def match(self, request: CoreRequest) -> tuple[list[CachedBlock], bool]:
        """Return the cached blocks at the start of the request's prompt, and whether the request should wait.

        The request should wait if another slot is now computing the block that follows the returned blocks. At least
        two tokens of the request remain outside the returned blocks.
        """
        if not request.reads_cache:
            return [], False
        usable = request.digests[: max(0, len(request.tokens) - 2) // self.block_size]
        matched = self.prefix_cache.find(usable)
        return matched, len(matched) < len(usable) and usable[len(matched)] in self._computing

    def register_computed(self, slots: Slots) -> None:
        """Add the complete prompt blocks of `slots` to the prefix cache.

        Call this after the step that computed them.
        """
        pages_per_block = self.prefix_cache.pages_per_block
        for slot in slots.tolist():
            chain = self._chains[slot]
            while chain.missing() and (chain.num_cached + 1) * self.block_size <= self.num_computed[slot]:
                first = chain.num_cached * pages_per_block
                key = chain.keys[chain.num_cached]
                is_cached = self.prefix_cache.register(key, self.block_tables[slot, first : first + pages_per_block])
                if self._computing.get(key) == slot:
                    del self._computing[key]
                if not is_cached:
                    self._stop_computing(slot)
                    break
                chain.num_cached += 1

    def _stop_computing(self, slot: int) -> None:
        """Add no more blocks of this slot to the prefix cache. Other requests no longer wait for these blocks."""
        chain = self._chains[slot]
        for digest in chain.missing():
            if self._computing.get(digest) == slot:
                del self._computing[digest]
        chain.keys = chain.keys[: chain.num_cached]

    def clear_prefix_cache(self) -> None:
        """Evict all blocks, because the weights have changed.

        Blocks that are being computed will not be cached either.
        """
        self._computing.clear()
        self._chains = {slot: _Chain([], 0) for slot in self._chains}
        self.prefix_cache.clear()
        self.transfers.clear()

    def held_pages(self) -> npt.NDArray[np.int64]:
        """Return the pages whose KV must be kept, which are the pages of slots and of cached blocks."""
        return np.flatnonzero((self.prefix_cache.references > 0) | self.prefix_cache.is_cached)

    # --- introspection ------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check that pages, slots and the prefix cache agree. Raises AssertionError."""
        held = [self.block_tables[slot, : self.num_pages[slot]] for slot in self._chains]
        held += self.transfers.held()
        self.prefix_cache.check_integrity(np.concatenate([np.empty(0, np.int32), *held]))
        slots = sorted([*self._free_slots, *self._chains])
        if slots != list(range(self.max_requests)):
            raise AssertionError(f"slots not held exactly once: {slots}")
        for slot, chain in self._chains.items():
            if self.num_computed[slot] > self.num_pages[slot] * self.page_size:
                raise AssertionError(f"slot {slot} computed {self.num_computed[slot]} tokens, more than its pages hold")
            cached = self.prefix_cache.find(chain.keys[: chain.num_cached])
            pages = [page for block in cached for page in block.pages.tolist()]
            if len(cached) != chain.num_cached or pages != self.block_tables[slot, : len(pages)].tolist():
                raise AssertionError(f"slot {slot} does not hold its {chain.num_cached} cached blocks")
        for digest, slot in self._computing.items():
            if digest not in self._chains[slot].missing():
                raise AssertionError(f"slot {slot} is registered to compute a block that it does not")
