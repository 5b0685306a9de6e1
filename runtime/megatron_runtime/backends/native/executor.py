"""The interface between the scheduler and the model. An executor gets a step plan and returns sampled tokens.

An executor can consist of one or several ranks. The scheduler works in the same way for both. This module does not
import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_runtime.sampling.batch import SamplingBatch
from megatron_runtime.sampling.sampler import LogProbs

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: T tokens of n rows (a row is one sequence) with up to P pages.

    token_ids, positions: int32 [T]; row by row. A position is the token's index in the sequence. If the model has a
                          `short_length`, the position is twice the index, plus 1 if the sequence is long.
    query_lengths:    int32 [n]; tokens of each row in this step.
    context_lengths:  int32 [n]; tokens of each row in the KV cache after this step.
    block_tables:     int32 [n, P]; pages of each row, padded with the dummy page.
    slot_mapping:     int64 [T]; cache slot of each token's key and value: page · page_size + offset.
    needs_sample:     bool [n]; whether to sample a token after the row's last token.
    sampling:         sampling parameters by row, and which log-probabilities to report.
    adapters:         key of the LoRA adapter of each row, empty for the base model; [] if no row has an adapter.
    """

    token_ids: Int32
    positions: Int32
    query_lengths: Int32
    context_lengths: Int32
    block_tables: Int32
    slot_mapping: Int64
    needs_sample: Bool
    sampling: SamplingBatch
    adapters: list[str] = field(default_factory=list)

    def tokens_of(self, rows: Int64) -> Int64:
        """Return the indices in token_ids of all tokens of `rows`, row after row."""
        counts = self.query_lengths[rows]
        ends = self.query_lengths.cumsum(dtype=np.int64)[rows]
        # The shift of a row converts positions in the result to indices in token_ids.
        shifts: Int64 = np.subtract(ends, counts.cumsum(dtype=np.int64))
        return np.repeat(shifts, counts) + np.arange(int(counts.sum()), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens of one step.

    tokens:           int32 [n]; NO_TOKEN if no token was sampled. A row that fails has a RowFailure, even if it needs
                      only log-probabilities of its prompt.
    log_probs:        by row, for the rows whose num_log_probs requests them; each LogProbs has one row.
    prompt_log_probs: by row of `sampling.prompt_targets`; each LogProbs has one row per target.
    hidden_states:    by row, float32 [D], for the sampled rows that request them.
    routing:          unsigned [T, G, J]; for each token of the plan and each of the G layers with experts, the J
                      experts by descending share. None if experts are not recorded.
    """

    tokens: npt.NDArray[Any]
    log_probs: Mapping[int, LogProbs] = field(default_factory=dict)
    prompt_log_probs: Mapping[int, LogProbs] = field(default_factory=dict)
    hidden_states: Mapping[int, npt.NDArray[Any]] = field(default_factory=dict)
    routing: npt.NDArray[Any] | None = None


class NoCudaProfilerError(RuntimeError):
    """Raised if a CUDA profile is requested from an executor that does not run on a GPU."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} has no CUDA profiler: use an engine on a GPU, or profile this process from outside (perf)"
        )


class Executor(Protocol):
    """An executor, which runs the steps of one model.

    All sizes are known before load(), from the model's metadata and the memory of the KV cache.

    page_size: number of tokens of a KV page.
    short_length: as in the model's configuration.
    num_pages: number of pages of the KV cache; the last page is the dummy page.
    kv_cache_bytes: size of the KV cache in bytes on each rank; 0 if unknown.
    page_bytes: size of the keys and values of one page in bytes, as read_blocks() returns them.
    kv_layout: text of at most 100 characters that is equal for two executors if their pages have equal contents for
               equal tokens.
    expert_size: number of expert ranks; 1 without expert parallelism. The expert rank that expert_of_pages() returns
               for the first page of a request holds the request's keys and values.
    records_routing: whether steps return the experts of each token.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    max_sequence_length: int
    short_length: int | None
    page_size: int
    num_pages: int
    page_bytes: int
    kv_layout: str
    expert_size: int
    records_routing: bool

    @property
    def kv_cache_bytes(self) -> int: ...
    @property
    def has_weights(self) -> bool: ...
    @property
    def digest(self) -> str:
        """Digest of the weights that were loaded last; empty before the first load. Any thread may read it."""

    @property
    def copies(self) -> tuple[str, ...]:
        """Addresses of the ranks at which other engines can get a trainer's weights; empty if there are none.

        Any thread may read them.
        """

    def load(self) -> None:
        """Load and verify the weights, allocate the KV cache, and restore the pages that release_kv() kept.

        Weights or a cache that are already loaded stay as they are. Raises if the weights are not usable or there is
        too little memory; in that case nothing changes.
        """

    def release_weights(self) -> None:
        """Release the memory of the weights in use and of staged weights."""

    def release_kv(self, keep_pages: Int64 | None) -> None:
        """Release the KV cache. load() restores the contents of `keep_pages`; None means no pages."""

    def read_blocks(self, table: Int32, blocks: range) -> bytes:
        """Return the keys and values of consecutive blocks of a prompt, block after block.

        table:  int32 [blocks, pages of a block]; pages of the prompt's blocks, from the first block on.
        blocks: the rows of `table` to read.
        """

    def write_blocks(self, table: Int32, blocks: range, data: bytes) -> None:
        """Write `data`, which read_blocks() has returned, to consecutive blocks of a prompt.

        Arguments as in read_blocks().
        """

    def holds(self, source: str) -> bool:
        """Return whether the weights in use are the trainer's weights that `source` names.

        Addresses in `source` are ignored.
        """

    def use_source(self, source: str) -> None:
        """Make load() read the weights `source` from now on.

        Allowed only while no weights are loaded, or if holds(source).
        """

    def stage_weights(self, source: str) -> None:
        """Read and verify new weights while the current weights stay in use. May run on another thread during a step.

        Raises ValueError for weights of another model. The message names the field and both values.
        """

    def swap_weights(self) -> None:
        """Use the staged weights from now on."""

    def drop_staged(self) -> None:
        """Discard the staged weights, if any."""

    def profile(self, active: bool) -> None:
        """Start or end the range that a CUDA profiler of this process records. Raises NoCudaProfilerError."""

    def execute(self, plan: StepPlan) -> StepResult: ...
