"""A causal language model, run one step plan at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_runtime.engines.executor import Int32, StepPlan
from megatron_runtime.engines.step_layout import Int64, lay_out
from megatron_runtime.layers.paged_attention import AttentionBatch
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


class GPTInferenceWrapper:
    """Lays a step plan out for a model and runs it (Megatron-Core `GPTInferenceWrapper`).

    page_size: tokens of a KV page.
    dtype:     of the model's activations.
    """

    def __init__(self, model: PagedModel, *, page_size: int, dtype: torch.dtype) -> None:
        self.model = model
        self._page_size = page_size
        self._dtype = dtype

    @torch.inference_mode()
    def run_one_forward_step(self, plan: StepPlan, cache_LPXE: torch.Tensor) -> ForwardStep:
        """Compute the plan's tokens; their keys and values go into the cache."""
        layout = lay_out(plan, page_size=self._page_size, dtype=self._dtype, window=self.model.sliding_window)
        x_ND = self.model(
            layout.token_ids_T,
            layout.positions_T,
            attention=layout.attention,
            cache_LPXE=cache_LPXE,
            rows_N=layout.logit_rows_N,
        )
        return ForwardStep(layout.sampled_rows, self.model, x_ND, layout.targets)
