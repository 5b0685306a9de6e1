"""Runs step plans on a CUDA device, and draws their tokens there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_runtime.backends.native.cuda.decode_graphs import DecodeGraphs, StepOutput, graph_size, graph_sizes
from megatron_runtime.backends.native.cuda.decoder import KernelDecoder
from megatron_runtime.backends.native.cuda.step_buffers import StagedStep, StepBuffers
from megatron_runtime.backends.native.executor import Int32, Int64, StepPlan
from megatron_runtime.backends.native.gpt_inference_wrapper import LOGIT_ROWS
from megatron_runtime.distributed.groups import Groups
from megatron_runtime.sampling.batch import Float32


@dataclass(frozen=True, slots=True)
class DeviceForwardStep:
    """Implements ForwardStep: what is on the device comes to the host when it is asked for.

    sampled_rows: the plan's rows that need a token.
    """

    sampled_rows: Int64
    _at: Int64
    """Where the sampled rows lie in the output."""
    _output: StepOutput
    _model: KernelDecoder
    _targets: list[tuple[int, slice]]
    """(row of the plan, its tokens in the step)"""

    def draw(self) -> Int32 | None:
        """int32 [n]: tokens of the sampled rows from the logits as the model gave them. Waits for the device."""
        tokens: Int32 = self._output.tokens_B.cpu().numpy()[self._at]
        return tokens

    @torch.inference_mode()
    def sampled_logits(self, which: Int64 | None = None) -> Float32:
        """float32 [n, V]. which: of these sampled rows; None means all."""
        rows = self._at if which is None else self._at[which]
        logits_NV = self._output.logits_BV[torch.from_numpy(rows).to(self._output.logits_BV.device)]
        found: Float32 = logits_NV.float().cpu().numpy()
        return found

    @torch.inference_mode()
    def prompt_logits(self) -> Iterator[tuple[int, int, Float32]]:
        """(row of the plan, number of the first target, float32 [at most LOGIT_ROWS, V]), for each block of targets."""
        x_TD = self._output.x_TD
        for row, where in self._targets:
            assert x_TD is not None, "a step with prompts is not replayed from a graph"
            for start in range(where.start, where.stop, LOGIT_ROWS):
                part_ND = x_TD[start : min(start + LOGIT_ROWS, where.stop)]
                yield row, start - where.start, self._model.logits(part_ND).float().cpu().numpy()


class DeviceInferenceWrapper:
    """As GPTInferenceWrapper, on a device. Steps of decodes alone are replayed from graphs.

    cache_LPXE: where it lies when graphs are captured; they are made anew when it has moved.
    graph_rows: of the largest graph; 0 captures none.
    """

    def __init__(self, model: KernelDecoder, buffers: StepBuffers, *, graph_rows: int) -> None:
        self.model = model
        self._buffers = buffers
        self._graph_sizes = graph_sizes(graph_rows)
        self._graphs: DecodeGraphs | None = None
        self._captured_with: int | None = None

    @torch.inference_mode()
    def run_one_forward_step(self, plan: StepPlan, cache_LPXE: torch.Tensor) -> DeviceForwardStep:
        """Compute the plan's tokens; their keys and values go into the cache."""
        return self.run(plan, cache_LPXE, size=self.graph_size(plan, len(plan.query_lengths)))

    def graph_size(self, plan: StepPlan, rows: int) -> int | None:
        """The size of the graph for `rows` of the plan; None where it has none, as it holds more than decodes."""
        is_decodes = bool((plan.query_lengths == 1).all()) and not plan.sampling.prompt_targets
        return graph_size(rows, self._graph_sizes) if is_decodes else None

    @torch.inference_mode()
    def run(self, plan: StepPlan, cache_LPXE: torch.Tensor, *, size: int | None) -> DeviceForwardStep:
        """size: of the graph to replay, at least the plan's rows; None runs it launch by launch."""
        staged = self._buffers.stage(plan, decode_size=size)
        if size is None:
            output = self._compute(staged, cache_LPXE)
        else:
            output = self._graphs_of(cache_LPXE).replay(size)
        return self._forward_step(plan, staged, output)

    @torch.inference_mode()
    def run_stage(self, plan: StepPlan, cache_LPXE: torch.Tensor, groups: Groups) -> DeviceForwardStep | None:
        """One pipeline stage of the plan's tokens, which come from the stage before and go to the next; None but in the
        last stage.
        """
        staged = self._buffers.stage(plan)
        if groups.shard.has_embedding:
            x_TD = self.model.embed(staged.step)
        else:
            hidden, dtype = self.model.config.hidden_size, cache_LPXE.dtype
            x_TD = groups.receive_from_previous_stage(len(plan.token_ids), hidden, dtype=dtype)
        x_TD = self.model.run_layers(x_TD, staged.step, cache_LPXE)
        if groups.shard.has_head:
            return self._forward_step(plan, staged, self._finish(x_TD, staged))
        groups.send_to_next_stage(x_TD)
        return None

    def _graphs_of(self, cache_LPXE: torch.Tensor) -> DecodeGraphs:
        if self._graphs is None or self._captured_with != cache_LPXE.data_ptr():
            self._graphs = DecodeGraphs(lambda size: self._decode(size, cache_LPXE))
            self._captured_with = cache_LPXE.data_ptr()
        return self._graphs

    def _decode(self, size: int, cache_LPXE: torch.Tensor) -> StepOutput:
        step = self._buffers.step(size, tokens=size, decodes=size)
        logits_BV = self.model.logits(self.model(step, cache_LPXE))
        return StepOutput(logits_BV, *self.model.sample(logits_BV, step))

    def _compute(self, staged: StagedStep, cache_LPXE: torch.Tensor) -> StepOutput:
        return self._finish(self.model(staged.step, cache_LPXE), staged)

    def _finish(self, x_TD: torch.Tensor, staged: StagedStep) -> StepOutput:
        last_B = torch.from_numpy(staged.ends - 1).to(x_TD.device)
        logits_BV = self.model.logits(x_TD.index_select(0, last_B))
        return StepOutput(logits_BV, *self.model.sample(logits_BV, staged.step), x_TD=x_TD)

    def _forward_step(self, plan: StepPlan, staged: StagedStep, output: StepOutput) -> DeviceForwardStep:
        at = np.flatnonzero(plan.needs_sample[staged.rows])
        where = {int(row): index for index, row in enumerate(staged.rows)}
        targets = []
        for row, tokens in plan.sampling.prompt_targets.items():
            first = int(staged.ends[where[row]]) - int(plan.query_lengths[row])
            targets.append((row, slice(first, first + len(tokens))))
        return DeviceForwardStep(staged.rows[at], at, output, self.model, targets)
