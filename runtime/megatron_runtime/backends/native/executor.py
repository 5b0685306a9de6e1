"""The interface between scheduling and arithmetic: a step plan goes in, sampled tokens come out. No torch.

The scheduler does not know whether an executor is one rank, many ranks, or an echo.
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
    """One step: T tokens of n rows (a row is one sequence), at most P pages a row.

    token_ids, positions: int32 [T], rows one after the other.
    query_lengths:    int32 [n]; tokens of each row in this step.
    context_lengths:  int32 [n]; tokens of each row in the KV cache after this step.
    block_tables:     int32 [n, P]; pages of each row, padded with the dummy page.
    slot_mapping:     int64 [T]; where each token's key and value go: page · page_size + offset.
    needs_sample:     bool [n]; sample a token after the row's last one.
    sampling:         parameters of the samples, and what to report of them.
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
    log_probs:        by row, of the rows whose num_log_probs asks for them; one line each.
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
    """Runs steps. Sizes are known before load(), from the model's metadata and the given amount of memory.

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
        """Digest of the last loaded weights; empty before the first load. May be read from any thread."""

    def load(self) -> None:
        """Load verified weights and allocate the KV pool with the pages that were kept, as far as they are missing.

        Raises if the weights are not sound or memory is short; nothing that was missing is there then.
        """

    def release_weights(self) -> None:
        """Release the memory of the weights, including staged ones."""

    def release_kv(self, keep_pages: Int64 | None) -> None:
        """Release the KV pool. load() restores the contents of `keep_pages`."""

    def use_source(self, source: str) -> None:
        """Make load() read these weights from now on; only while no weights are loaded."""

    def stage_weights(self, source: str) -> None:
        """Read and verify weights beside those in use. The only method that may run during a step, on another thread.

        Raises ValueError naming what differs from the weights in use, with both values.
        """

    def swap_weights(self) -> None:
        """Use the staged weights from now on."""

    def drop_staged(self) -> None:
        """Discard the staged weights, if any."""

    def profile(self, active: bool) -> None:
        """Begin or end the range that a CUDA profiler of this process records. Raises NoCudaProfilerError."""

    def execute(self, plan: StepPlan) -> StepResult: ...
