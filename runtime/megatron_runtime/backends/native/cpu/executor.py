"""An executor that runs a model on the CPU, in the C++ kernels if they support the model, else in torch operators.

T tokens, n rows, N tokens whose logits are needed, S cached tokens of the longest row of a group (whole pages),
X tokens of a page.
"""

from __future__ import annotations

import ctypes
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
from megatron_runtime.models.layers.paged_attention import AttentionBatch, DecodeGroup, PrefillChunk

ForwardPass = Callable[[StepPlan, torch.Tensor], ForwardStep]

MAX_PADDED_TOKENS = 128
"""A decode group is split if its padding costs more than the operations of another group. Measured with a 135M model in
float32 on one thread, both cost the same between 64 and 256 padded tokens."""


class CpuExecutor(TorchExecutor):
    """A TorchExecutor on the CPU.

    dtype:        "auto" (see select_numbers), "float32", "bfloat16", "float16", "int8" or "int4".
    make_forward: returns the forward pass of a model, instead of this module's forward().
    """

    def __init__(
        self,
        source: ModelSource,
        controller: ModelText | None = None,
        *,
        dtype: str = "auto",
        make_forward: Callable[[DecoderModel, torch.dtype], ForwardPass] | None = None,
        **options: Unpack[TorchOptions],
    ) -> None:
        self.model: DecoderModel | None = None
        self._make_forward = make_forward
        self._run: ForwardPass | None = None
        """The forward pass of `make_forward`; None: this module's."""
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

    def _use_model(self, weights: DecoderWeights | None) -> None:
        self.model = self._run = None
        if weights is None:
            return
        self.model = build_decoder(self.model_config, weights, shard=self._shard, collectives=self._groups)
        if self._make_forward is not None:
            self._run = self._make_forward(self.model, self.dtype)

    def _forward(self, plan: StepPlan, batch: MicroBatch, cache_LPXE: torch.Tensor) -> ForwardStep | None:
        model, groups, shard = self.model, self._groups, self._shard
        assert model is not None, "execute_part() checks that the weights are loaded"
        if groups is None:
            if self._run is not None:
                return self._run(plan, cache_LPXE)
            return forward(
                model, plan, cache_LPXE, dtype=self.dtype, routing_GTJ=self._new_routing(len(plan.token_ids))
            )
        groups.begin(batch.tokens_of_experts)
        rows: StepLayout | PlannedRows
        if _runs_in_cpp(model, cache_LPXE):
            rows = logit_rows(batch.plan)
            token_ids_T = torch.from_numpy(batch.plan.token_ids)
            run_layers = partial(model.run_rank, batch.plan)
        else:
            clear_new_pages(batch.plan, cache_LPXE)
            rows = layout = lay_out(batch.plan, page_size=self.page_size, dtype=self.dtype, window=model.sliding_window)
            token_ids_T = layout.token_ids_T
            run_layers = partial(model.run_layers, positions_T=layout.positions_T, attention=layout.attention)
        if shard.has_embedding:
            x_TD = model.embed(token_ids_T)
        else:
            hidden = self.model_config.hidden_size
            x_TD = groups.receive_from_previous_stage(len(token_ids_T), hidden, dtype=self.dtype)
        routing_GTJ = self._new_routing(len(x_TD))
        x_TD = run_layers(x_TD=x_TD, cache_LPXE=cache_LPXE, routing_GTJ=routing_GTJ)
        if not shard.has_head:
            self._send_to_next_stage(x_TD, routing_GTJ)
            return None
        return logits_of_step(model, batch.plan, rows, x_TD, routing_GTJ)

    def _trim_memory(self) -> None:
        """Have glibc return freed memory. Weights and cache are in no reference cycle and need no garbage collection,
        which would delay the heartbeats of an engine with a large heap.
        """
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@torch.inference_mode()
def forward(
    model: DecoderModel,
    plan: StepPlan,
    cache_LPXE: torch.Tensor,
    *,
    dtype: torch.dtype,
    routing_GTJ: torch.Tensor | None = None,
) -> ForwardStep:
    """Compute the plan's tokens and write their keys and values to the cache.

    dtype:       of the model's activations.
    routing_GTJ: memory for the experts of the tokens; None does not record them.
    """
    if _runs_in_cpp(model, cache_LPXE):
        return _forward_in_cpp(model, plan, cache_LPXE, routing_GTJ)
    clear_new_pages(plan, cache_LPXE)
    layout = lay_out(plan, page_size=cache_LPXE.shape[2], dtype=dtype, window=model.sliding_window)
    x_TD = model.embed(layout.token_ids_T)
    x_TD = model.run_layers(
        x_TD, layout.positions_T, attention=layout.attention, cache_LPXE=cache_LPXE, routing_GTJ=routing_GTJ
    )
    return logits_of_step(model, plan, layout, x_TD, routing_GTJ)


def logits_of_step(
    model: DecoderModel, plan: StepPlan, rows: PlannedRows, x_TD: torch.Tensor, routing_GTJ: torch.Tensor | None
) -> ForwardStep:
    """Return the output of a step, given the hidden states after the last layer and the experts of its tokens."""
    sampled_N = rows.logit_rows_N[: len(rows.sampled_rows)]
    logits_NV = model.logits(x_TD.index_select(0, sampled_N)) if len(sampled_N) else x_TD[:0]
    return _forward_step(model, plan, rows, x_TD, logits_NV=logits_NV, routing_GTJ=routing_GTJ)


def _forward_step(
    model: DecoderModel,
    plan: StepPlan,
    rows: PlannedRows,
    x_TD: torch.Tensor,
    *,
    logits_NV: torch.Tensor,
    routing_GTJ: torch.Tensor | None,
) -> ForwardStep:
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
    """Return whether the kernels run the step. They read PANEL tokens of a page at a time."""
    return isinstance(model, CppDecoder) and cache_LPXE.shape[2] % PANEL == 0


def _forward_in_cpp(
    model: CppDecoder, plan: StepPlan, cache_LPXE: torch.Tensor, routing_GTJ: torch.Tensor | None
) -> ForwardStep:
    rows = logit_rows(plan)
    sampled = len(rows.sampled_rows)
    x_TD, sampled_NV = model.run_plan(plan, cache_LPXE, rows.logit_rows_N[:sampled].numpy(), routing_GTJ)
    logits_NV = torch.from_numpy(sampled_NV)
    return _forward_step(model, plan, rows, x_TD, logits_NV=logits_NV, routing_GTJ=routing_GTJ)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRows(LogitRows):
    """logit_rows_N: the tokens whose logits are needed, one for each of sampled_rows, then those of `targets`."""

    logit_rows_N: torch.Tensor


def logit_rows(plan: StepPlan) -> PlannedRows:
    """Return the tokens whose logits a plan needs, in the plan's order."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout(PlannedRows):
    """The model's arguments for one step: rows with one new token in groups of similar length, then prompts."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    attention: AttentionBatch


def clear_new_pages(plan: StepPlan, cache_LPXE: torch.Tensor) -> None:
    """Clear the pages that rows begin in this step and do not fill.

    Attention in torch operators multiplies hidden places by 0, and what another request left there may not be finite.
    """
    lengths, size = plan.context_lengths, cache_LPXE.shape[2]
    last = (lengths - 1) // size
    begun = np.flatnonzero((lengths - plan.query_lengths <= last * size) & (lengths % size != 0))
    if len(begun):
        cache_LPXE[:, torch.from_numpy(plan.block_tables[begun, last[begun]].astype(np.int64))] = 0


def lay_out(plan: StepPlan, *, page_size: int, dtype: torch.dtype, window: int | None = None) -> StepLayout:
    """Return the layout of `plan`.

    dtype:  of the attention masks, the same as the model's.
    window: tokens that a layer with a sliding window attends to; None for a model without such layers.
    """
    lengths = plan.context_lengths.astype(np.int64)
    is_decode = plan.query_lengths == 1
    decodes = np.flatnonzero(is_decode)
    decodes = decodes[np.argsort(-lengths[decodes], kind="stable")]
    rows = np.concatenate([decodes, np.flatnonzero(~is_decode)])
    counts = plan.query_lengths[rows].astype(np.int64)
    ends = counts.cumsum()
    order_T = plan.tokens_of(rows)
    groups = [slice(start, stop) for start, stop in _decode_groups(-(-lengths[decodes] // page_size), page_size)]

    def attention(masks: _Masks, local: AttentionBatch | None) -> AttentionBatch:
        decoded = [masks.decode_group(part, lengths[rows[part]], plan.block_tables[rows[part]]) for part in groups]
        prefilled = [
            masks.prefill_chunk(slice(ends[i] - counts[i], ends[i]), int(lengths[rows[i]]), plan.block_tables[rows[i]])
            for i in range(len(decodes), len(rows))
        ]
        return AttentionBatch(cache_rows_T, decoded, prefilled, local)

    cache_rows_T = torch.from_numpy(plan.slot_mapping[order_T])
    local = None
    if window is not None and lengths.max() > window:
        local = attention(_Masks(page_size, dtype, window), None)
    is_sampled = plan.needs_sample[rows]
    logit_rows = [ends[is_sampled] - 1]
    targets, end = [], int(is_sampled.sum())
    if plan.sampling.prompt_targets:
        firsts = dict(zip(rows.tolist(), (ends - counts).tolist(), strict=True))
        for row, tokens in plan.sampling.prompt_targets.items():
            logit_rows.append(firsts[row] + np.arange(len(tokens)))
            targets.append((row, slice(end, end + len(tokens))))
            end += len(tokens)
    return StepLayout(
        order=rows,
        token_ids_T=torch.from_numpy(plan.token_ids[order_T]),
        positions_T=torch.from_numpy(plan.positions[order_T]),
        logit_rows_N=torch.from_numpy(np.concatenate(logit_rows)),
        attention=attention(_Masks(page_size, dtype, None), local),
        sampled_rows=rows[is_sampled],
        targets=targets,
    )


def _decode_groups(pages: Int64, page_size: int) -> list[tuple[int, int]]:
    """Split rows, given by their number of pages in descending order, into (start, stop) of similar length."""
    groups, start, padding = [], 0, 0
    for index, count in enumerate(pages):
        padding += int(pages[start] - count) * page_size
        if padding > MAX_PADDED_TOKENS:
            groups.append((start, index))
            start, padding = index, 0
    if len(pages):
        groups.append((start, len(pages)))
    return groups


@dataclass(frozen=True, slots=True)
class _Masks:
    """Masks by which each token attends to itself and the tokens before it, `window` at most; only over their pages."""

    page_size: int
    dtype: torch.dtype
    window: int | None

    def decode_group(self, rows: slice, lengths: Int64, block_tables: npt.NDArray[np.int32]) -> DecodeGroup:
        first_B = self._first_visible(lengths - 1) // self.page_size
        pages = int((-(-lengths // self.page_size) - first_B).max())
        index_BP = first_B[:, None] + np.arange(pages)
        tokens_BS = (first_B * self.page_size)[:, None] + np.arange(pages * self.page_size)
        # A row with fewer pages is padded with its own last page, which the mask hides.
        held_BP = np.take_along_axis(
            block_tables, np.minimum(index_BP, (lengths - 1)[:, None] // self.page_size), axis=1
        )
        return DecodeGroup(
            rows=rows,
            pages=torch.from_numpy(held_BP.astype(np.int64).ravel()),
            mask_B11S=self._mask(self._is_visible(lengths - 1, tokens_BS))[:, None, None],
        )

    def prefill_chunk(self, rows: slice, length: int, block_table: npt.NDArray[np.int32]) -> PrefillChunk:
        count = rows.stop - rows.start
        queries_T = np.arange(length - count, length)
        if count == length:
            if self.window is None or length <= self.window:
                return PrefillChunk(rows, None, None)
            return PrefillChunk(rows, None, self._mask(self._is_visible(queries_T, queries_T)))
        first = int(self._first_visible(queries_T[:1])[0]) // self.page_size
        pages = -(-length // self.page_size)
        tokens_S = np.arange(first * self.page_size, pages * self.page_size)
        table = torch.from_numpy(block_table[first:pages].astype(np.int64))
        return PrefillChunk(rows, table, self._mask(self._is_visible(queries_T, tokens_S)))

    def _first_visible(self, queries: Int64) -> Int64:
        return np.zeros_like(queries) if self.window is None else np.maximum(queries - self.window + 1, 0)

    def _is_visible(self, queries_N: Int64, tokens_S: Int64) -> npt.NDArray[np.bool_]:
        queries_N1 = queries_N[:, None]
        visible: npt.NDArray[np.bool_] = tokens_S <= queries_N1
        if self.window is not None:
            visible &= tokens_S > queries_N1 - self.window
        return visible

    def _mask(self, is_visible: npt.NDArray[np.bool_]) -> torch.Tensor:
        hidden = torch.from_numpy(~is_visible)
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
