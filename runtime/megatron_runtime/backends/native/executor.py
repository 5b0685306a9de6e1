"""The interface between the scheduler and the model: an executor gets a step plan and returns sampled tokens. No torch.

An executor may consist of one or several ranks, which makes no difference to the scheduler.
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

    token_ids, positions: int32 [T]; row by row. Rotary positions: the index in the sequence. If the model has a
                          `short_length`, twice the index, plus one in a long sequence.
    query_lengths:    int32 [n]; tokens of each row in this step.
    context_lengths:  int32 [n]; tokens of each row in the KV cache after this step.
    block_tables:     int32 [n, P]; pages of each row, padded with the dummy page.
    slot_mapping:     int64 [T]; cache slot of each token's key and value: page · page_size + offset.
    needs_sample:     bool [n]; sample a token after the row's last one.
    sampling:         sampling parameters by row, and the log-probabilities to report.
    adapters:         key of the LoRA adapter of each row, empty for the base model; [] if no row has one.
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
        """Return the indices in token_ids of the tokens of `rows`, one row after the other."""
        counts = self.query_lengths[rows]
        ends = self.query_lengths.cumsum(dtype=np.int64)[rows]
        # Offset to add to an index in the result; it differs by row.
        shifts: Int64 = np.subtract(ends, counts.cumsum(dtype=np.int64))
        return np.repeat(shifts, counts) + np.arange(int(counts.sum()), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens of one step.

    tokens:           int32 [n]; NO_TOKEN if no token was sampled. A RowFailure for a row that fails, whether it needs a
                      token or only log-probabilities of its prompt.
    log_probs:        by row, for the rows whose num_log_probs requests them; one line each.
    prompt_log_probs: by row of `sampling.prompt_targets`; one line for each target.
    hidden_states:    float32 [D] by row, of the sampled rows that return them.
    routing:          unsigned [T, G, J]: the J experts of each token of the plan in the G layers with experts, by
                      descending share; None if they are not recorded.
    """

    tokens: npt.NDArray[Any]
    log_probs: Mapping[int, LogProbs] = field(default_factory=dict)
    prompt_log_probs: Mapping[int, LogProbs] = field(default_factory=dict)
    hidden_states: Mapping[int, npt.NDArray[Any]] = field(default_factory=dict)
    routing: npt.NDArray[Any] | None = None


class NoCudaProfilerError(RuntimeError):
    """The executor does not run on a GPU."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} has no CUDA profiler: use an engine on a GPU, or profile this process from outside (perf)"
        )


class Executor(Protocol):
    """Runs the steps of one model. Sizes are known before load(), from the model's metadata and the KV cache's memory.

    page_size: tokens of a KV page.
    short_length: as in the model's configuration.
    num_pages: pages of the KV cache; the last one is the dummy page.
    kv_cache_bytes: size on each rank; 0: unknown.
    kv_layout: text that is equal for executors whose pages have equal contents for equal tokens; empty: pages can
               neither be read nor written, because several ranks hold them.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    max_sequence_length: int
    short_length: int | None
    page_size: int
    num_pages: int
    kv_layout: str

    @property
    def kv_cache_bytes(self) -> int: ...
    @property
    def has_weights(self) -> bool: ...
    @property
    def digest(self) -> str:
        """Digest of the last loaded weights; empty before the first load. May be read from any thread."""

    @property
    def copies(self) -> tuple[str, ...]:
        """Address of each rank at which other engines get the weights of a trainer; empty if there is none. May be read
        from any thread.
        """

    def load(self) -> None:
        """Load and verify the weights, and allocate the KV cache with the kept pages.

        Parts that are already loaded are not loaded again. Raises if the weights are not usable or memory is short; in
        that case nothing changes.
        """

    def release_weights(self) -> None:
        """Release the memory of the weights, including staged ones."""

    def release_kv(self, keep_pages: Int64 | None) -> None:
        """Release the KV cache. load() restores the contents of `keep_pages`."""

    def read_pages(self, pages: Int32) -> bytes:
        """Return the keys and values of some pages. Requires a `kv_layout`."""

    def write_pages(self, pages: Int32, data: bytes) -> None:
        """Restore the keys and values of pages that read_pages() returned."""

    def holds(self, source: str) -> bool:
        """Return whether the weights in use are these weights of a trainer, at any address."""

    def use_source(self, source: str) -> None:
        """Make load() read these weights from now on. Only while no weights are loaded, or if holds(source)."""

    def stage_weights(self, source: str) -> None:
        """Read and verify new weights while the current ones stay in use. May run on another thread during a step.

        Raises ValueError for weights of another model, with the field and both values.
        """

    def swap_weights(self) -> None:
        """Use the staged weights from now on."""

    def drop_staged(self) -> None:
        """Discard the staged weights, if any."""

    def profile(self, active: bool) -> None:
        """Begin or end the range that a CUDA profiler of this process records. Raises NoCudaProfilerError."""

    def execute(self, plan: StepPlan) -> StepResult: ...
