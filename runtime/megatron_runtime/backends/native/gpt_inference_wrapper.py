"""A causal language model, run one step plan at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from megatron_kernels.cpu.sizes import UNIT
from megatron_runtime.backends.native.executor import Int32, StepPlan
from megatron_runtime.backends.native.step_layout import Int64, lay_out
from megatron_runtime.models.layers.paged_attention import AttentionBatch
from megatron_runtime.sampling.batch import Float32

LOGIT_ROWS = 64
"""Prompt tokens whose logits exist at once: with a vocabulary of 128k that is 32 MiB."""


class PagedModel(Protocol):
    """A model over a paged KV cache; `models/` says what the letters mean."""

    @property
    def sliding_window(self) -> int | None:
        """Tokens that a layer sees that does not see everything; None where all do."""

    def __call__(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        *,
        attention: AttentionBatch,
        cache_LPXE: torch.Tensor,
        rows_N: torch.Tensor,
    ) -> torch.Tensor: ...

    def logits(self, x_ND: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class PlannedModel(PagedModel, Protocol):
    """A model that runs plans as they are."""

    def run_plan(
        self, plan: StepPlan, cache_LPXE: torch.Tensor, logit_rows_N: Int64
    ) -> tuple[torch.Tensor, Float32]: ...

    def finish(self, x_TD: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor: ...


class Forwarded(Protocol):
    """What one forward pass leaves, on whatever device: ForwardStep says what the methods return."""

    @property
    def sampled_rows(self) -> Int64: ...
    def draw(self) -> Int32 | None: ...
    def sampled_logits(self, which: Int64 | None = None) -> Float32: ...
    def prompt_logits(self) -> Iterator[tuple[int, int, Float32]]: ...


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """What one forward pass leaves: last hidden states, from which logits are made as they are needed.

    sampled_rows: int64 [n]; the plan's rows that need a token, in the order of sampled_logits().
    """

    sampled_rows: Int64
    _model: PagedModel
    _x_ND: torch.Tensor
    _targets: list[tuple[int, slice]]

    def draw(self) -> Int32 | None:
        """int32 [n]: tokens that were drawn where the logits are; None where the host samples."""
        return None

    @torch.inference_mode()
    def sampled_logits(self, which: Int64 | None = None) -> Float32:
        """float32 [n, V]. which: of these sampled rows, ascending; None means all."""
        if which is None or len(which) == len(self.sampled_rows):
            return self._logits(slice(0, len(self.sampled_rows)))
        return self._logits(torch.from_numpy(which))

    @torch.inference_mode()
    def prompt_logits(self) -> Iterator[tuple[int, int, Float32]]:
        """(row of the plan, number of the first target, float32 [at most LOGIT_ROWS, V]), for each block of targets."""
        for row, where in self._targets:
            for start in range(where.start, where.stop, LOGIT_ROWS):
                yield row, start - where.start, self._logits(slice(start, min(start + LOGIT_ROWS, where.stop)))

    def _logits(self, rows: slice | torch.Tensor) -> Float32:
        logits: Float32 = self._model.logits(self._x_ND[rows]).numpy()
        return logits


@dataclass(frozen=True, slots=True)
class PlannedStep(ForwardStep):
    """One whose sampled logits are there already."""

    _sampled_NV: Float32 = field(kw_only=True)

    def sampled_logits(self, which: Int64 | None = None) -> Float32:
        if which is None or len(which) == len(self.sampled_rows):
            return self._sampled_NV
        return self._sampled_NV[which]


class GPTInferenceWrapper:
    """Lays a step plan out for a model and runs it (Megatron-Core `GPTInferenceWrapper`).

    page_size: tokens of a KV page.
    dtype:     of the model's activations.
    """

    def __init__(self, model: PagedModel, *, page_size: int, dtype: torch.dtype) -> None:
        self.model = model
        self._page_size = page_size
        self._dtype = dtype
        # Compiled attention reads whole panels of a page.
        self._planned = model if isinstance(model, PlannedModel) and page_size % UNIT == 0 else None

    @torch.inference_mode()
    def run_one_forward_step(self, plan: StepPlan, cache_LPXE: torch.Tensor) -> ForwardStep:
        """Compute the plan's tokens; their keys and values go into the cache."""
        if self._planned is not None:
            return self._run_plan(self._planned, plan, cache_LPXE)
        layout = lay_out(plan, page_size=self._page_size, dtype=self._dtype, window=self.model.sliding_window)
        x_ND = self.model(
            layout.token_ids_T,
            layout.positions_T,
            attention=layout.attention,
            cache_LPXE=cache_LPXE,
            rows_N=layout.logit_rows_N,
        )
        return ForwardStep(layout.sampled_rows, self.model, x_ND, layout.targets)

    def _run_plan(self, model: PlannedModel, plan: StepPlan, cache_LPXE: torch.Tensor) -> PlannedStep:
        ends = plan.query_lengths.cumsum(dtype=np.int64)
        sampled_rows = np.flatnonzero(plan.needs_sample)
        x_TD, logits_NV = model.run_plan(plan, cache_LPXE, ends[sampled_rows] - 1)
        x_ND, targets = x_TD[:0], []
        if plan.sampling.prompt_targets:
            rows, end = [], 0
            for row, tokens in plan.sampling.prompt_targets.items():
                rows.append(ends[row] - plan.query_lengths[row] + np.arange(len(tokens)))
                targets.append((row, slice(end, end + len(tokens))))
                end += len(tokens)
            x_ND = model.finish(x_TD, torch.from_numpy(np.concatenate(rows)))
        return PlannedStep(sampled_rows, model, x_ND, targets, _sampled_NV=logits_NV)
