"""How a step plan is laid out for the model: rows with one new token in groups of about one length, then prompts.

T tokens, n rows, S cached tokens of the longest row of a group (whole pages), X tokens of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron_runtime.engines.executor import StepPlan
from megatron_runtime.layers.paged_attention import AttentionBatch, DecodeGroup, PrefillChunk

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


def lay_out(plan: StepPlan, *, page_size: int, dtype: torch.dtype) -> StepLayout:
    """Return the layout of `plan`. dtype: of the attention masks, the same as the model's."""
    lengths = plan.context_lengths.astype(np.int64)
    is_decode = plan.query_lengths == 1
    decodes = np.flatnonzero(is_decode)
    decodes = decodes[np.argsort(-lengths[decodes], kind="stable")]
    rows = np.concatenate([decodes, np.flatnonzero(~is_decode)])
    counts = plan.query_lengths[rows].astype(np.int64)
    ends = counts.cumsum()
    first_in_plan = (plan.query_lengths.cumsum() - plan.query_lengths)[rows]
    order_T = np.repeat(first_in_plan - (ends - counts), counts) + np.arange(len(plan.token_ids))
    masks = _Masks(page_size, dtype)
    groups = []
    for start, stop in _groups(-(-lengths[decodes] // page_size), page_size):
        groups.append(
            masks.decode_group(slice(start, stop), lengths[rows[start:stop]], plan.block_tables[rows[start:stop]])
        )
    prefills = [
        masks.prefill_chunk(slice(ends[i] - counts[i], ends[i]), int(lengths[rows[i]]), plan.block_tables[rows[i]])
        for i in range(len(decodes), len(rows))
    ]
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
        attention=AttentionBatch(torch.from_numpy(plan.slot_mapping[order_T]), groups, prefills),
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
    page_size: int
    dtype: torch.dtype

    def decode_group(self, rows: slice, lengths: Int64, block_tables: npt.NDArray[np.int32]) -> DecodeGroup:
        pages = -(-int(lengths[0]) // self.page_size)
        is_seen = np.arange(pages * self.page_size) < lengths[:, None]
        return DecodeGroup(
            rows=rows,
            pages=torch.from_numpy(block_tables[:, :pages].astype(np.int64).ravel()),
            mask_B11S=self._mask(is_seen)[:, None, None],
        )

    def prefill_chunk(self, rows: slice, length: int, block_table: npt.NDArray[np.int32]) -> PrefillChunk:
        count = rows.stop - rows.start
        if count == length:
            return PrefillChunk(rows, None, None)
        pages = -(-length // self.page_size)
        is_seen = np.arange(pages * self.page_size) <= np.arange(length - count, length)[:, None]
        return PrefillChunk(rows, torch.from_numpy(block_table[:pages].astype(np.int64)), self._mask(is_seen))

    def _mask(self, is_seen: npt.NDArray[np.bool_]) -> torch.Tensor:
        return torch.zeros(is_seen.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(~is_seen), float("-inf"))
