"""The executor that runs a model on the CPU.

It uses the C++ kernels if they support the model, otherwise torch operators.

Shapes: T tokens, n rows, N tokens whose logits are needed, S cached tokens of a row, X tokens of a page.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard, Unpack

import numpy as np
import numpy.typing as npt
import torch

from megatron_kernels.cpu.library import PANEL
from megatron_runtime.backends.native.executor import Int64, StepPlan
from megatron_runtime.backends.native.micro_batches import MicroBatch
from megatron_runtime.backends.native.torch_executor import (
    ForwardStep,
    LogitRows,
    TorchExecutor,
    TorchOptions,
    rows_not_finite,
)
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.source import ModelSource
from megatron_runtime.models.cpp_decoder import CppDecoder, build_decoder
from megatron_runtime.models.decoder import DecoderModel, DecoderWeights
from megatron_runtime.models.layers.cpu import numbers_of
from megatron_runtime.models.layers.paged_attention import AttentionBatch, SequenceRows

ForwardPass = Callable[[StepPlan, torch.Tensor], ForwardStep]


class CpuExecutor(TorchExecutor):
    """A TorchExecutor on the CPU.

    dtype:        "auto" (see select_numbers), "float32", "bfloat16", "float16", "int8" or "int4".
    make_forward: returns the forward pass of a model, which replaces forward() of this module.
    """

    def __init__(
        self,
        source: ModelSource,
        controller: ModelText | None = None,
        *,
        dtype: str = "auto",
        make_forward: Callable[[DecoderModel], ForwardPass] | None = None,
        **options: Unpack[TorchOptions],
    ) -> None:
        self.model: DecoderModel | None = None
        self._make_forward = make_forward
        self._run: ForwardPass | None = None
        """The forward pass that `make_forward` returned; None means this module's forward()."""
        numbers = numbers_of(dtype, open_checkpoint(source))
        super().__init__(
            source,
            controller,
            device=torch.device("cpu"),
            dtype=torch.float32,
            cache_dtype=numbers.cache,
            linears=numbers.linears,
            **options,
        )
        self.kv_layout += f" {numbers.weights}"

    def _use_model(self, weights: DecoderWeights | None) -> None:
        self.model = self._run = None
        if weights is None:
            return
        self.model = build_decoder(self.model_config, weights, shard=self._shard, collectives=self._groups)
        if self._make_forward is not None:
            self._run = self._make_forward(self.model)

    def _forward(self, plan: StepPlan, batch: MicroBatch, cache_LPXE: torch.Tensor) -> ForwardStep | None:
        model, groups, shard = self.model, self._groups, self._shard
        assert model is not None, "execute_part() checks that the weights are loaded"
        if groups is None:
            if self._run is not None:
                return self._run(plan, cache_LPXE)
            return forward(model, plan, cache_LPXE, self._new_routing(len(plan.token_ids)))
        groups.begin(batch.tokens_of_experts)
        if _runs_in_cpp(model, cache_LPXE):
            run_layers = partial(model.run_rank, batch.plan)
        else:
            run_layers = partial(_run_layers, model, batch.plan)
        if shard.has_embedding:
            x_TD = model.embed(torch.from_numpy(batch.plan.token_ids))
        else:
            hidden = self.model_config.hidden_size
            x_TD = groups.receive_from_previous_stage(len(batch.plan.token_ids), hidden, dtype=self.dtype)
        routing_GTJ = self._new_routing(len(x_TD))
        x_TD = run_layers(x_TD=x_TD, cache_LPXE=cache_LPXE, routing_GTJ=routing_GTJ)
        if not shard.has_head:
            self._send_to_next_stage(x_TD, routing_GTJ)
            return None
        return _output_of(model, batch.plan, logit_rows(batch.plan), x_TD, routing_GTJ)

    @torch.inference_mode()
    def swap_weights(self) -> None:
        """Use the staged weights.

        Another thread releases the replaced weights. On this thread, the release would delay the next step by about
        0.1 s per gigabyte.
        """
        replaced = [self._store.weights, self.model, self._run]
        self._store.swap()
        self._use_model(self._store.weights)
        threading.Thread(target=self._release, args=(replaced,), name="release weights", daemon=True).start()

    def _release(self, replaced: list[object]) -> None:
        replaced.clear()
        self._trim_memory()

    def _trim_memory(self) -> None:
        """Make glibc return freed memory to the system.

        This method does not run the garbage collector, because weights and cache are not in reference cycles. A
        collection would delay the heartbeats of an engine with a large heap.
        """
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@torch.inference_mode()
def forward(
    model: DecoderModel, plan: StepPlan, cache_LPXE: torch.Tensor, routing_GTJ: torch.Tensor | None = None
) -> ForwardStep:
    """Run the model on the plan's tokens, write the keys and values to the cache, and return the output of the step.

    routing_GTJ: receives the experts of each token; None if they are not recorded.
    """
    rows = logit_rows(plan)
    if _runs_in_cpp(model, cache_LPXE):
        sampled_N = rows.logit_rows_N[: len(rows.sampled_rows)].numpy()
        x_TD, logits_NV = model.run_plan(plan, cache_LPXE, sampled_N, routing_GTJ)
        return _output_of(model, plan, rows, x_TD, routing_GTJ, torch.from_numpy(logits_NV))
    x_TD = model.embed(torch.from_numpy(plan.token_ids))
    x_TD = _run_layers(model, plan, x_TD=x_TD, cache_LPXE=cache_LPXE, routing_GTJ=routing_GTJ)
    return _output_of(model, plan, rows, x_TD, routing_GTJ)


def _run_layers(
    model: DecoderModel,
    plan: StepPlan,
    *,
    x_TD: torch.Tensor,
    cache_LPXE: torch.Tensor,
    routing_GTJ: torch.Tensor | None,
) -> torch.Tensor:
    """Run this rank's layers with torch operators, and return the hidden states after the last of these layers."""
    attention = attention_batch(plan, page_size=cache_LPXE.shape[2], dtype=x_TD.dtype, window=model.sliding_window)
    positions_T = torch.from_numpy(plan.positions)
    return model.run_layers(x_TD, positions_T, attention=attention, cache_LPXE=cache_LPXE, routing_GTJ=routing_GTJ)


def _output_of(
    model: DecoderModel,
    plan: StepPlan,
    rows: PlannedRows,
    x_TD: torch.Tensor,
    routing_GTJ: torch.Tensor | None,
    logits_NV: torch.Tensor | None = None,
) -> ForwardStep:
    """Return the output of a step, given the hidden states after the last layer and the experts of its tokens.

    logits_NV: logits of the sampled rows. If None, this function computes them.
    """
    if logits_NV is None:
        sampled_N = rows.logit_rows_N[: len(rows.sampled_rows)]
        logits_NV = model.logits(x_TD.index_select(0, sampled_N)) if len(sampled_N) else x_TD[:0]

    def hidden_of(which: Int64) -> torch.Tensor:
        return model.finish(x_TD.index_select(0, rows.logit_rows_N[torch.from_numpy(which)]))

    return ForwardStep(
        rows=rows,
        logits_BV=logits_NV,
        logits_of=model.logits,
        hidden_of=hidden_of,
        not_finite=partial(rows_not_finite, x_TD, plan, rows.order),
        x_TD=x_TD.index_select(0, rows.logit_rows_N) if rows.targets else None,
        routing_GTJ=routing_GTJ,
    )


def _runs_in_cpp(model: DecoderModel, cache_LPXE: torch.Tensor) -> TypeGuard[CppDecoder]:
    """Return whether the C++ kernels can run the step. The page size must be a multiple of PANEL."""
    return isinstance(model, CppDecoder) and cache_LPXE.shape[2] % PANEL == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRows(LogitRows):
    """The tokens of a step whose logits are computed.

    logit_rows_N: indices of these tokens in the step. The last tokens of sampled_rows come first, then the tokens of
                  `targets`.
    """

    logit_rows_N: torch.Tensor


def logit_rows(plan: StepPlan) -> PlannedRows:
    """Return the tokens of a plan whose logits are needed, in the plan's order."""
    ends = plan.query_lengths.cumsum(dtype=np.int64)
    sampled_rows = np.flatnonzero(plan.needs_sample)
    rows, targets, end = [ends[sampled_rows] - 1], [], len(sampled_rows)
    for row, tokens in plan.sampling.prompt_targets.items():
        rows.append(ends[row] - plan.query_lengths[row] + np.arange(len(tokens)))
        targets.append((row, slice(end, end + len(tokens))))
        end += len(tokens)
    return PlannedRows(
        order=np.arange(len(ends)),
        sampled_rows=sampled_rows,
        targets=targets,
        logit_rows_N=torch.from_numpy(np.concatenate(rows)),
    )


def attention_batch(plan: StepPlan, *, page_size: int, dtype: torch.dtype, window: int | None = None) -> AttentionBatch:
    """Return the AttentionBatch of a plan: the cache positions of its tokens, and the tokens to which each attends.

    dtype:  type of the attention masks, equal to the model's type.
    window: number of tokens that a layer with a sliding window attends to; None if the model has no such layer.
    """
    cache_rows_T = torch.from_numpy(plan.slot_mapping)
    lengths, ends = plan.context_lengths.tolist(), plan.query_lengths.cumsum().tolist()

    def batch(window: int | None, local: AttentionBatch | None = None) -> AttentionBatch:
        masks = _Masks(page_size, dtype, window)
        starts = [0, *ends[:-1]]
        rows = zip(map(slice, starts, ends), lengths, plan.block_tables, strict=True)
        return AttentionBatch(cache_rows_T, [masks.sequence_rows(*row) for row in rows], local)

    return batch(None, batch(window) if window is not None and max(lengths) > window else None)


@dataclass(frozen=True, slots=True)
class _Masks:
    """A factory of attention masks.

    Each token attends to itself and the tokens before it, at most `window` tokens in total. A mask covers only the
    pages of the token's sequence.
    """

    page_size: int
    dtype: torch.dtype
    window: int | None

    def sequence_rows(self, rows: slice, length: int, block_table: npt.NDArray[np.int32]) -> SequenceRows:
        queries_T = np.arange(length - (rows.stop - rows.start), length)
        if queries_T[0] == 0:
            is_causal = self.window is None or length <= self.window
            return SequenceRows(rows, None, None if is_causal else self._mask(queries_T, queries_T))
        first = 0 if self.window is None else max(0, int(queries_T[0]) - self.window + 1) // self.page_size
        table = torch.from_numpy(block_table[first : -(-length // self.page_size)].astype(np.int64))
        return SequenceRows(rows, table, self._mask(queries_T, np.arange(first * self.page_size, length)))

    def _mask(self, queries_T: Int64, tokens_S: Int64) -> torch.Tensor:
        queries_T1 = queries_T[:, None]
        is_hidden = tokens_S > queries_T1
        if self.window is not None:
            is_hidden |= tokens_S <= queries_T1 - self.window
        hidden = torch.from_numpy(is_hidden)
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
