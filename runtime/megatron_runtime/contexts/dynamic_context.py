"""Requests that hold a slot: their tokens, parameters and pages, as columns indexed by slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_runtime.contexts.block_allocator import BlockAllocator
from megatron_runtime.requests.errors import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    RequestRefusedError,
    TensorStateDeallocatedError,
    TokenOverflowError,
)
from megatron_runtime.sampling_params import SamplingParams

__all__ = [
    "ActiveRequestCountOverflowError",
    "BlockOverflowError",
    "DynamicInferenceContext",
    "MaxSequenceLengthOverflowError",
    "RequestOverflowError",
    "RequestRefusedError",
    "TensorStateDeallocatedError",
    "TokenOverflowError",
]


class DynamicInferenceContext:
    """Columns by slot. A slot is taken at admission and freed with its pages when the request ends or is preempted.

    tokens:       int32 [slots, max_sequence_length]; prompt, then generated.
    num_tokens:   int32 [slots]; how many of them there are.
    num_computed: int32 [slots]; how many of them are in the KV cache.
    block_tables: int32 [slots, pages per sequence]; the dummy page where nothing is held.
    """

    def __init__(self, *, max_requests: int, max_sequence_length: int, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.max_requests = max_requests
        self.allocator = BlockAllocator(num_pages)
        self.max_sequence_length = min(max_sequence_length, self.allocator.num_usable * page_size)
        pages = -(-self.max_sequence_length // page_size)
        self.tokens = np.zeros((max_requests, self.max_sequence_length), dtype=np.int32)
        self.num_tokens = np.zeros(max_requests, dtype=np.int32)
        self.num_computed = np.zeros(max_requests, dtype=np.int32)
        self.num_pages = np.zeros(max_requests, dtype=np.int32)
        self.block_tables = np.full((max_requests, pages), self.allocator.dummy, dtype=np.int32)
        self.prompt_length = np.zeros(max_requests, dtype=np.int32)
        self.temperature = np.zeros(max_requests, dtype=np.float32)
        self.top_k = np.zeros(max_requests, dtype=np.int32)
        self.top_p = np.zeros(max_requests, dtype=np.float32)
        self.seeds = np.zeros(max_requests, dtype=np.uint64)
        self.wants_log_probs = np.zeros(max_requests, dtype=bool)
        self._free_slots = list(range(max_requests))[::-1]
        self._taken: set[int] = set()

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def usage(self) -> float:
        """Share of the usable pages that is held, 0 to 1."""
        return 1 - self.allocator.num_free / self.allocator.num_usable

    def admit(self, tokens: npt.NDArray[Any], *, prompt_length: int, params: SamplingParams, seed: int) -> int:
        """Take a slot for `tokens` (prompt and what was generated before); no pages yet."""
        slot = self._free_slots.pop()
        self._taken.add(slot)
        count = len(tokens)
        self.tokens[slot, :count] = tokens
        self.num_tokens[slot] = count
        self.num_computed[slot] = 0
        self.prompt_length[slot] = prompt_length
        self.temperature[slot] = 0.0 if params.is_greedy else params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.seeds[slot] = np.uint64(seed)
        self.wants_log_probs[slot] = params.return_log_probs
        return slot

    def reserve(self, slot: int, length: int) -> bool:
        """Make room for `length` tokens of KV. False, and nothing taken, when pages are short."""
        held = int(self.num_pages[slot])
        missing = -(-length // self.page_size) - held
        if missing <= 0:
            return True
        pages = self.allocator.allocate(missing)
        if pages is None:
            return False
        self.block_tables[slot, held : held + missing] = pages
        self.num_pages[slot] = held + missing
        return True

    def append(self, slot: int, token: int) -> None:
        count = int(self.num_tokens[slot])
        self.tokens[slot, count] = token
        self.num_tokens[slot] = count + 1

    def release(self, slot: int) -> None:
        """Free the slot and its pages."""
        held = int(self.num_pages[slot])
        self.allocator.release(self.block_tables[slot, :held])
        self.block_tables[slot, :held] = self.allocator.dummy
        self.num_pages[slot] = 0
        self.num_computed[slot] = 0
        self._taken.remove(slot)
        self._free_slots.append(slot)

    def check_integrity(self) -> None:
        """Every page and every slot is free or held exactly once. Raises AssertionError."""
        held = [self.block_tables[slot, : self.num_pages[slot]] for slot in self._taken]
        self.allocator.check_integrity(np.concatenate([np.empty(0, np.int32), *held]))
        slots = sorted([*self._free_slots, *self._taken])
        if slots != list(range(self.max_requests)):
            raise AssertionError(f"slots not held exactly once: {slots}")
        for slot in self._taken:
            if self.num_computed[slot] > self.num_pages[slot] * self.page_size:
                raise AssertionError(f"slot {slot} computed {self.num_computed[slot]} tokens, more than its pages hold")
