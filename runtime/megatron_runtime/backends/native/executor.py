"""The seam between scheduling and arithmetic: a step plan goes in, sampled tokens come out.

An executor is one rank, many ranks, or an echo; the scheduler cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_runtime.sampling.batch import SamplingBatch
from megatron_runtime.sampling.log_probs import LogProbs

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
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
    sampling:         how, and what to report of it.
    """

    token_ids: Int32
    positions: Int32
    query_lengths: Int32
    context_lengths: Int32
    block_tables: Int32
    slot_mapping: Int64
    needs_sample: Bool
    sampling: SamplingBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """tokens:           int32 [n], −1 where nothing was sampled.
    log_probs:        of the rows whose num_log_probs asks for them, by row; one line each.
    prompt_log_probs: by row of `sampling.prompt_targets`: a line for each target.
    """

    tokens: npt.NDArray[Any]
    log_probs: Mapping[int, LogProbs] = field(default_factory=dict)
    prompt_log_probs: Mapping[int, LogProbs] = field(default_factory=dict)


class NoCudaProfilerError(RuntimeError):
    """This executor runs on no GPU."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} has no CUDA profiler: use an engine on a GPU, or profile this process from outside (perf)"
        )


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

    @property
    def has_weights(self) -> bool: ...
    @property
    def digest(self) -> str:
        """Of the weights that were loaded last; empty before. May be read from any thread."""

    def load(self) -> None:
        """Have verified weights and the KV pool, with what was kept of it: whatever of these is missing.

        Raises, with what was missing still missing: weights that are not sound, or too little memory.
        """

    def release_weights(self) -> None:
        """Give the memory of the weights back, of staged ones too."""

    def release_kv(self, keep_pages: Int64 | None) -> None:
        """Give the KV pool back. What `keep_pages` hold is kept elsewhere, and there again after load()."""

    def use_source(self, source: str) -> None:
        """load() reads these weights from now on; only while none are loaded."""

    def stage_weights(self, source: str) -> None:
        """Read and verify weights beside those in use. The only method that may run beside a step, in another thread.

        Raises ValueError naming what differs from the weights in use, with both values.
        """

    def swap_weights(self) -> None:
        """The staged weights are in use from here on."""

    def drop_staged(self) -> None:
        """Forget what was staged, if anything."""

    def profile(self, active: bool) -> None:
        """Begin, or end, the range that a CUDA profiler around this process records. Raises NoCudaProfilerError."""

    def execute(self, plan: StepPlan) -> StepResult: ...
