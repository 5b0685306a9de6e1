"""The seam between scheduling and arithmetic: a step plan goes in, sampled tokens come out.

An executor is one rank, many ranks, or an echo; the scheduler cannot tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: T tokens of n rows (a row is one sequence), at most P pages a row.

    token_ids, positions: int32 [T], rows one after the other.
    query_lengths:    int32 [n]; tokens of each row in this step.
    context_lengths:  int32 [n]; tokens of each row in the KV cache after this step.
    block_tables:     int32 [n, P]; pages of each row, padded with the dummy page.
    slot_mapping:     int64 [T]; where each token's key and value go: page · page_size + offset.
    needs_sample:     bool [n]; draw a token after the row's last one.
    temperature, top_k, top_p: [n]; 0 means greedy, off, off.
    seeds:            uint64 [n]; with sample_positions they fix the random number.
    sample_positions: int64 [n]; which generated token of the request is drawn.
    wants_log_probs:  bool [n].
    """

    token_ids: Int32
    positions: Int32
    query_lengths: Int32
    context_lengths: Int32
    block_tables: Int32
    slot_mapping: Int64
    needs_sample: Bool
    temperature: Float32
    top_k: Int32
    top_p: Float32
    seeds: npt.NDArray[np.uint64]
    sample_positions: Int64
    wants_log_probs: Bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """tokens: int32 [n], −1 where nothing was sampled. log_probs: float32 [n] of the sampled tokens, or None."""

    tokens: npt.NDArray[Any]
    log_probs: Float32 | None = None


class Executor(Protocol):
    """Runs steps. Sizes are known before load(), from the model's metadata and the memory given.

    num_pages counts the dummy page, the last one.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def max_sequence_length(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...

    def load(self) -> None:
        """Load weights and allocate the KV pool; also how a released executor comes back."""

    def release(self) -> None:
        """Give weights and KV pool back to the operating system."""

    def execute(self, plan: StepPlan) -> StepResult: ...
