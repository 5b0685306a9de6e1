"""One rank's share of a step on a device: StageRunner's way of cutting a plan, the kernels' way of running it.

Every tensor rank draws the tokens, from the same gathered logits; those of the first one count. Ranks that share
experts replay graphs together: of one size, that of the one with the most rows, so that what they exchange has one size
as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_runtime.backends.native.cuda.inference_wrapper import DeviceInferenceWrapper
from megatron_runtime.backends.native.executor import StepPlan, StepResult
from megatron_runtime.backends.native.ranked.micro_batches import MicroBatch, cut
from megatron_runtime.backends.native.stage_runner import Parts
from megatron_runtime.backends.native.text_generation_controller import TextGenerationController
from megatron_runtime.distributed.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStageRunner:
    """As StageRunner. Without stages, steps of decodes are replayed from graphs, collectives included.

    device:     of this rank.
    dummy_page: of the KV pool.
    """

    wrapper: DeviceInferenceWrapper
    controller: TextGenerationController
    groups: Groups
    device: torch.device
    hidden_size: int
    page_size: int
    dummy_page: int

    @torch.inference_mode()
    def run(self, plan: StepPlan, cache_LPXE: torch.Tensor) -> Parts:
        """Compute this rank's share of `plan`; return what this rank sampled, with its rows."""
        shard = self.groups.shard
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread: kernels and graphs are launched on it
        parts: Parts = []
        for batch in cut(
            plan, shard.sizes, expert_rank=shard.expert_rank, dummy_page=self.dummy_page, page_size=self.page_size
        ):
            size = self._graph_size(plan, batch)
            tokens = batch.tokens_of_experts if size is None else (size,) * shard.expert_size
            self.groups.begin(tokens)
            result = self._run_one(batch, cache_LPXE, size=size)
            if result is not None and len(batch.rows):
                parts.append((batch.rows, result))
        self.groups.flush()
        return parts

    def _graph_size(self, plan: StepPlan, batch: MicroBatch) -> int | None:
        """The same on every rank: each knows the whole plan."""
        if self.groups.shard.pipeline_size > 1:
            return None
        return self.wrapper.graph_size(plan, max(batch.tokens_of_experts))

    def _run_one(self, batch: MicroBatch, cache_LPXE: torch.Tensor, *, size: int | None) -> StepResult | None:
        shard = self.groups.shard
        if shard.pipeline_size == 1:
            step = self.wrapper.run(batch.plan, cache_LPXE, size=size)
        else:
            found = self.wrapper.run_stage(batch.plan, cache_LPXE, self.groups)
            if found is None:
                return None
            step = found
        self.groups.progress.reach("sampling")
        result = None
        if shard.tensor_rank == 0:
            result = self.controller.sample_step(step, batch.plan)
        else:  # every tensor rank has a part of the logits that the first one reads
            for _ in step.prompt_logits():
                pass
        if result is None or not len(step.sampled_rows):
            step.draw()  # waits for the device, so that the step has been done when it is said to be
        return result
