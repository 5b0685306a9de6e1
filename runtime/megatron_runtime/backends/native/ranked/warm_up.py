"""Steps that an engine of many ranks runs once it has loaded, of no request: they compile, allocate and connect what
the first step of a request would have to, and tell each rank how long its part of a step takes. No torch.

Their rows lie, as far as reading and the choice of an expert rank go, in pages of whoever; what they write goes to the
dummy page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_runtime.backends.native.executor import Int32, Int64, StepPlan
from megatron_runtime.backends.native.ranked.micro_batches import expert_of_pages
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.sampling.batch import SamplingBatch

_MOST_TARGETS = 64
"""Prompt tokens of a row whose log-probabilities are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """tokens, rows: the most of a step. length: the most tokens of a row."""

    tokens: int
    rows: int
    length: int

    def at_most(self, other: StepSizes) -> StepSizes:
        return StepSizes(
            tokens=min(self.tokens, other.tokens),
            rows=min(self.rows, other.rows),
            length=min(self.length, other.length),
        )


PROCESSOR = StepSizes(tokens=32, rows=8, length=32)
"""Enough that what a token takes is what it takes in a long prompt; seconds with a large model."""
GPU = StepSizes(tokens=512, rows=64, length=512)
"""Enough that each kernel is compiled in all its forms: some have one for few tokens and one for many."""


def warm_up_plans(sizes: ParallelSizes, most: StepSizes, *, num_pages: int, page_size: int) -> list[StepPlan]:
    """Prompts, one a rank that shares experts; decodes; a single decode. All are sampled, with log-probabilities."""
    pages = _page_of_each_expert_rank(sizes.expert, num_pages)[: min(most.rows, most.tokens)]
    prompt = max(1, min(most.length, most.tokens // len(pages)))
    decodes = np.resize(pages, min(most.rows, most.tokens))
    return [
        _plan(first_pages, tokens=tokens, num_pages=num_pages, page_size=page_size)
        for first_pages, tokens in ((pages, prompt), (decodes, 1), (pages[:1], 1))
    ]


def _page_of_each_expert_rank(expert_size: int, num_pages: int) -> Int32:
    """Pages whose rows fall to different expert ranks; to fewer of them where there are hardly any pages."""
    owners = expert_of_pages(np.arange(num_pages), expert_size)
    return np.unique(owners, return_index=True)[1].astype(np.int32)


def _plan(first_pages: Int32, *, tokens: int, num_pages: int, page_size: int) -> StepPlan:
    """`tokens` new tokens in each row."""
    rows, dummy = len(first_pages), num_pages - 1
    lengths = np.full(rows, tokens, dtype=np.int32)
    positions = np.tile(np.arange(tokens, dtype=np.int32), rows)
    tables = np.full((rows, -(-tokens // page_size)), dummy, dtype=np.int32)
    tables[:, 0] = first_pages
    slots: Int64 = dummy * page_size + positions.astype(np.int64) % page_size
    targets = np.zeros(min(tokens - 1, _MOST_TARGETS), dtype=np.int32)
    return StepPlan(
        token_ids=np.zeros(rows * tokens, dtype=np.int32),
        positions=positions,
        query_lengths=lengths,
        context_lengths=lengths,
        block_tables=tables,
        slot_mapping=slots,
        needs_sample=np.ones(rows, dtype=np.bool_),
        sampling=SamplingBatch(
            temperature=np.ones(rows, dtype=np.float32),
            top_k=np.zeros(rows, dtype=np.int32),
            top_p=np.full(rows, 0.9, dtype=np.float32),
            min_p=np.zeros(rows, dtype=np.float32),
            seeds=np.zeros(rows, dtype=np.uint64),
            positions=np.zeros(rows, dtype=np.int64),
            num_log_probs=np.zeros(rows, dtype=np.int32),
            prompt_targets=dict.fromkeys(range(rows), targets) if len(targets) else {},
        ),
    )
