"""A forward pass on the CPU: a step plan laid out for the model, the model's run, and the logits that it leaves.

T tokens, n rows, N tokens whose logits are wanted, S cached tokens of the longest row of a group (whole pages),
X tokens of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron_kernels.cpu.sizes import UNIT
from megatron_runtime.backends.native.executor import Int64, StepPlan
from megatron_runtime.backends.native.torch_executor import ForwardStep
from megatron_runtime.models.decoder import DecoderModel
from megatron_runtime.models.layers.paged_attention import AttentionBatch, DecodeGroup, PrefillChunk
from megatron_runtime.models.native_decoder import NativeDecoder

MAX_PADDED_TOKENS = 128
"""A decode group is split where padding costs more than another group's operations: measured with a 135M model in
float32, one thread, both cost the same between 64 and 256 padded tokens."""


@torch.inference_mode()
def forward(model: DecoderModel, plan: StepPlan, cache_LPXE: torch.Tensor, *, dtype: torch.dtype) -> ForwardStep:
    """Compute the plan's tokens, and write their keys and values to the cache. dtype: of the model's activations."""
    page_size = cache_LPXE.shape[2]
    if isinstance(model, NativeDecoder) and page_size % UNIT == 0:  # compiled attention reads whole panels of a page
        return _forward_compiled(model, plan, cache_LPXE)
    layout = lay_out(plan, page_size=page_size, dtype=dtype, window=model.sliding_window)
    x_TD = model.embed(layout.token_ids_T)
    x_TD = model.run_layers(x_TD, layout.positions_T, attention=layout.attention, cache_LPXE=cache_LPXE)
    return logits_of_step(model, layout, x_TD)


def logits_of_step(model: DecoderModel, layout: StepLayout, x_TD: torch.Tensor) -> ForwardStep:
    """The output of a step, from the hidden states after the last layer."""
    sampled = len(layout.sampled_rows)
    x_ND = model.finish(x_TD, layout.logit_rows_N)
    logits_NV = model.logits(x_ND[:sampled]) if sampled else x_ND[:0]
    return ForwardStep(layout.sampled_rows, slice(None), logits_NV, None, model, x_ND, layout.targets)


def _forward_compiled(model: NativeDecoder, plan: StepPlan, cache_LPXE: torch.Tensor) -> ForwardStep:
    ends = plan.query_lengths.cumsum(dtype=np.int64)
    sampled_rows = np.flatnonzero(plan.needs_sample)
    x_TD, sampled_NV = model.run_plan(plan, cache_LPXE, ends[sampled_rows] - 1)
    x_ND, rows, targets, end = None, [], [], 0
    for row, tokens in plan.sampling.prompt_targets.items():
        rows.append(ends[row] - plan.query_lengths[row] + np.arange(len(tokens)))
        targets.append((row, slice(end, end + len(tokens))))
        end += len(tokens)
    if rows:
        x_ND = model.finish(x_TD, torch.from_numpy(np.concatenate(rows)))
    return ForwardStep(sampled_rows, slice(None), torch.from_numpy(sampled_NV), None, model, x_ND, targets)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The model's arguments for one step: rows with one new token in groups of about one length, then prompts.

    logit_rows_N: tokens whose last hidden state is wanted: one for each of sampled_rows, then those of `targets`.
    sampled_rows, targets: as in ForwardStep.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    logit_rows_N: torch.Tensor
    attention: AttentionBatch
    sampled_rows: Int64
    targets: list[tuple[int, slice]]


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
    first_in_plan = (plan.query_lengths.cumsum() - plan.query_lengths)[rows]
    order_T = np.repeat(first_in_plan - (ends - counts), counts) + np.arange(len(plan.token_ids))
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
        token_ids_T=torch.from_numpy(plan.token_ids[order_T]),
        positions_T=torch.from_numpy(plan.positions[order_T]),
        logit_rows_N=torch.from_numpy(np.concatenate(logit_rows)),
        attention=attention(_Masks(page_size, dtype, None), local),
        sampled_rows=rows[is_sampled],
        targets=targets,
    )


def _decode_groups(pages: Int64, page_size: int) -> list[tuple[int, int]]:
    """Split rows, given by their number of pages in descending order, into (start, stop) of about equal lengths."""
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
    """Each token attends to itself and the tokens before it, at most `window` in all. Other pages are left out."""

    page_size: int
    dtype: torch.dtype
    window: int | None

    def decode_group(self, rows: slice, lengths: Int64, block_tables: npt.NDArray[np.int32]) -> DecodeGroup:
        first_B = self._first_seen(lengths - 1) // self.page_size
        pages = int((-(-lengths // self.page_size) - first_B).max())
        index_BP = first_B[:, None] + np.arange(pages)
        tokens_BS = (first_B * self.page_size)[:, None] + np.arange(pages * self.page_size)
        # A row that has fewer pages is padded with its table's last, which the mask hides.
        held_BP = np.take_along_axis(block_tables, np.minimum(index_BP, block_tables.shape[1] - 1), axis=1)
        return DecodeGroup(
            rows=rows,
            pages=torch.from_numpy(held_BP.astype(np.int64).ravel()),
            mask_B11S=self._mask(self._is_seen(lengths - 1, tokens_BS))[:, None, None],
        )

    def prefill_chunk(self, rows: slice, length: int, block_table: npt.NDArray[np.int32]) -> PrefillChunk:
        count = rows.stop - rows.start
        queries_T = np.arange(length - count, length)
        if count == length:
            if self.window is None or length <= self.window:
                return PrefillChunk(rows, None, None)
            return PrefillChunk(rows, None, self._mask(self._is_seen(queries_T, queries_T)))
        first = int(self._first_seen(queries_T[:1])[0]) // self.page_size
        pages = -(-length // self.page_size)
        tokens_S = np.arange(first * self.page_size, pages * self.page_size)
        table = torch.from_numpy(block_table[first:pages].astype(np.int64))
        return PrefillChunk(rows, table, self._mask(self._is_seen(queries_T, tokens_S)))

    def _first_seen(self, queries: Int64) -> Int64:
        return np.zeros_like(queries) if self.window is None else np.maximum(queries - self.window + 1, 0)

    def _is_seen(self, queries_N: Int64, tokens_S: Int64) -> npt.NDArray[np.bool_]:
        queries_N1 = queries_N[:, None]
        seen: npt.NDArray[np.bool_] = tokens_S <= queries_N1
        if self.window is not None:
            seen &= tokens_S > queries_N1 - self.window
        return seen

    def _mask(self, is_seen: npt.NDArray[np.bool_]) -> torch.Tensor:
        return torch.zeros(is_seen.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(~is_seen), float("-inf"))
