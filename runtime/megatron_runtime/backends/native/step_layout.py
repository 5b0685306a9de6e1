"""How a step plan is laid out for the model: rows with one new token in groups of about one length, then prompts.

T tokens, n rows, S cached tokens of the longest row of a group (whole pages), X tokens of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron_runtime.backends.native.executor import StepPlan
from megatron_runtime.models.layers.paged_attention import AttentionBatch, DecodeGroup, PrefillChunk

MAX_PADDED_TOKENS = 128
"""A decode group is split where padding costs more than another group's operations: measured with a 135M model in
float32, one thread, both cost the same between 64 and 256 padded tokens."""

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The model's arguments for one step.

    logit_rows_N:   tokens whose last hidden state is wanted: one for each of sampled_rows, then those of `targets`.
    sampled_rows:   the plan's rows that need a token, in that order.
    targets:        (row of the plan, where its prompt targets lie in logit_rows_N).
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
    window: tokens that a layer with a sliding window sees; None for a model that has none.
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
    groups = [slice(start, stop) for start, stop in _groups(-(-lengths[decodes] // page_size), page_size)]

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


def _groups(pages: Int64, page_size: int) -> list[tuple[int, int]]:
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
    """What each token sees: itself and what is before it, `window` tokens at most, of pages that hold any of these."""

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
