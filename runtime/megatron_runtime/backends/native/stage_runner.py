"""One rank's share of a step: its micro-batches, through its pipeline stage, to the tokens of the last stage.

T tokens of a micro-batch, N rows whose next token is wanted, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_runtime.backends.native.executor import StepPlan, StepResult
from megatron_runtime.backends.native.gpt_inference_wrapper import ForwardStep, PagedModel
from megatron_runtime.backends.native.ranked.micro_batches import MicroBatch, Rows, cut
from megatron_runtime.backends.native.step_layout import StepLayout, lay_out
from megatron_runtime.backends.native.text_generation_controller import TextGenerationController
from megatron_runtime.distributed.groups import Groups
from megatron_runtime.models.layers.paged_attention import AttentionBatch

Parts = list[tuple[Rows, StepResult]]


class StagedModel(PagedModel, Protocol):
    """A model in pieces, of which a pipeline stage has some."""

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor: ...

    def run_layers(
        self,
        x_TD: torch.Tensor,
        positions_T: torch.Tensor,
        *,
        attention: AttentionBatch,
        cache_LPXE: torch.Tensor,
    ) -> torch.Tensor: ...

    def finish(self, x_TD: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRunner:
    """Runs plans through the part of a model that this rank holds.

    dummy_page: of the KV pool; a rank without work of its own computes a token there.
    """

    model: StagedModel
    controller: TextGenerationController
    groups: Groups
    hidden_size: int
    page_size: int
    dummy_page: int
    dtype: torch.dtype

    @torch.inference_mode()
    def run(self, plan: StepPlan, cache_LPXE: torch.Tensor) -> Parts:
        """Compute this rank's share of `plan`. Returns the tokens that this rank sampled, with their rows: of the first
        tensor rank in the last stage, those of its expert rank; of all others none.
        """
        shard = self.groups.shard
        batches = cut(
            plan, shard.sizes, expert_rank=shard.expert_rank, dummy_page=self.dummy_page, page_size=self.page_size
        )
        parts: Parts = []
        for batch in batches:
            part = self._run_one(batch, cache_LPXE)
            if part is not None and len(batch.rows):
                parts.append((batch.rows, part))
        self.groups.flush()
        return parts

    def _run_one(self, batch: MicroBatch, cache_LPXE: torch.Tensor) -> StepResult | None:
        groups, shard = self.groups, self.groups.shard
        layout = lay_out(batch.plan, page_size=self.page_size, dtype=self.dtype, window=self.model.sliding_window)
        groups.begin(batch.tokens_of_experts)
        if shard.has_embedding:
            x_TD = self.model.embed(layout.token_ids_T)
        else:
            x_TD = groups.receive_from_previous_stage(len(layout.token_ids_T), self.hidden_size, dtype=self.dtype)
        x_TD = self.model.run_layers(x_TD, layout.positions_T, attention=layout.attention, cache_LPXE=cache_LPXE)
        if not shard.has_head:
            groups.send_to_next_stage(x_TD)
            return None
        groups.progress.reach("sampling")
        return self._sample(batch, layout, self.model.finish(x_TD, layout.logit_rows_N))

    def _sample(self, batch: MicroBatch, layout: StepLayout, x_ND: torch.Tensor) -> StepResult | None:
        step = ForwardStep(layout.sampled_rows, self.model, x_ND, layout.targets)
        if self.groups.shard.tensor_rank == 0:
            return self.controller.sample_step(step, batch.plan)
        # Every tensor rank has a part of the logits that the first one samples from.
        if len(step.sampled_rows):
            step.sampled_logits()
        for _ in step.prompt_logits():
            pass
        return None
