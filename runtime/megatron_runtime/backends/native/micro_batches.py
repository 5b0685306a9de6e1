"""How a step plan is split: the rows of each expert rank, and the micro-batches that pass the pipeline. No torch.

Every rank splits the same plan in the same way, so that ranks need not communicate about it. `warm_up_plans` returns
the plans that ranks run once they have loaded, for no request: they compile, allocate and connect what the first step
of a request would otherwise have to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_runtime.backends.native.executor import Int32, Int64, StepPlan, StepResult
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.sampling.batch import NO_LOG_PROBS, SamplingBatch
from megatron_runtime.sampling.sampler import LogProbs

_SPREAD = 2654435761  # Knuth's multiplier: neighbouring pages land on different ranks

_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions", "num_log_probs")

Rows = Int64


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What passes the pipeline at once.

    plan: of this expert rank's rows. Without rows it has one token in the dummy page, because the other ranks' experts
          wait for this rank.
    rows: their numbers in the whole plan; empty for the dummy token.
    tokens_of_experts: tokens that each expert rank runs in this micro-batch.
    """

    plan: StepPlan
    rows: Rows
    tokens_of_experts: tuple[int, ...]


def cut(plan: StepPlan, sizes: ParallelSizes, *, expert_rank: int, dummy_page: int, page_size: int) -> list[MicroBatch]:
    """The micro-batches of `expert_rank`, as many as the other expert ranks have."""
    everyone = np.arange(len(plan.query_lengths))
    if sizes.expert == 1 and sizes.pipeline == 1:
        return [MicroBatch(plan, everyone, (len(plan.token_ids),))]
    owners = expert_of_rows(plan, sizes.expert)
    of_experts = [np.flatnonzero(owners == rank) for rank in range(sizes.expert)]
    count = max(1, min(sizes.pipeline, max(map(len, of_experts))))
    parts = [_balanced(plan, rows, count) for rows in of_experts]
    dummy = _plan(np.array([dummy_page], dtype=np.int32), dummy_page, page_size=page_size, is_sampled=False)
    batches = []
    for index in range(count):
        tokens = tuple(max(1, int(plan.query_lengths[part[index]].sum())) for part in parts)
        rows = parts[expert_rank][index]
        mine = take(plan, rows) if len(rows) else dummy
        batches.append(MicroBatch(mine, rows, tokens))
    return batches


def expert_of_rows(plan: StepPlan, expert_size: int) -> Rows:
    """The expert rank that runs each row: its first page determines it.

    Requests that share cached KV share their first page, so they meet on one rank; a request keeps its first page
    while it runs, so its KV stays where it is.
    """
    if expert_size == 1:
        return np.zeros(len(plan.query_lengths), dtype=np.int64)
    return expert_of_pages(plan.block_tables[:, 0], expert_size)


def expert_of_pages(pages: npt.NDArray[np.integer[Any]], expert_size: int) -> Rows:
    """The expert ranks of rows with these first pages."""
    spread = pages.astype(np.uint64) * np.uint64(_SPREAD) % np.uint64(1 << 32)
    return (spread >> np.uint64(16)).astype(np.int64) % expert_size


def take(plan: StepPlan, rows: Rows) -> StepPlan:
    """A plan of these rows only."""
    if len(rows) == len(plan.query_lengths):
        return plan
    lengths = plan.query_lengths
    starts = lengths.cumsum() - lengths
    tokens = np.concatenate([np.arange(starts[row], starts[row] + lengths[row]) for row in rows])
    batch, places = plan.sampling, {int(row): index for index, row in enumerate(rows)}
    return StepPlan(
        token_ids=plan.token_ids[tokens],
        positions=plan.positions[tokens],
        query_lengths=lengths[rows],
        context_lengths=plan.context_lengths[rows],
        block_tables=plan.block_tables[rows],
        slot_mapping=plan.slot_mapping[tokens],
        needs_sample=plan.needs_sample[rows],
        sampling=SamplingBatch(
            **{name: getattr(batch, name)[rows] for name in _COLUMNS},
            edits={places[row]: found for row, found in batch.edits.items() if row in places},
            prompt_targets={places[row]: found for row, found in batch.prompt_targets.items() if row in places},
        ),
    )


def merge(parts: Sequence[tuple[Rows, StepResult]], num_rows: int) -> StepResult:
    """The result of the whole plan, from those of its parts with their rows."""
    if len(parts) == 1 and len(parts[0][0]) == num_rows:
        return parts[0][1]
    tokens = np.full(num_rows, -1, dtype=np.int32)
    found: dict[int, LogProbs] = {}
    of_prompts: dict[int, LogProbs] = {}
    for rows, result in parts:
        tokens[rows] = result.tokens
        found |= {int(rows[row]): value for row, value in result.log_probs.items()}
        of_prompts |= {int(rows[row]): value for row, value in result.prompt_log_probs.items()}
    return StepResult(tokens, found, of_prompts)


def _balanced(plan: StepPlan, rows: Rows, count: int) -> list[Rows]:
    """`rows` in `count` parts of about equally many tokens, in order. Parts are empty if there are too few rows."""
    if count == 1:
        return [rows]
    ends = plan.query_lengths[rows].cumsum()
    total = int(ends[-1]) if len(rows) else 0
    # A row belongs to the part in which its middle token lies.
    middles = ends - plan.query_lengths[rows] / 2
    part_of_row = np.minimum((middles * count / max(total, 1)).astype(np.int64), count - 1)
    return [rows[part_of_row == part] for part in range(count)]


_MOST_TARGETS = 64
"""Prompt tokens of a warm-up row whose log-probabilities are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """tokens, rows: the most of a step. length: the most tokens of a row."""

    tokens: int
    rows: int
    length: int

    def at_most(self, other: StepSizes) -> StepSizes:
        tokens, rows = min(self.tokens, other.tokens), min(self.rows, other.rows)
        return StepSizes(tokens=tokens, rows=rows, length=min(self.length, other.length))


CPU = StepSizes(tokens=32, rows=8, length=32)
"""A few seconds with a large model."""
GPU = StepSizes(tokens=512, rows=64, length=512)
"""Enough that each kernel is compiled in all its variants: some have one for few tokens and one for many."""


def warm_up_plans(sizes: ParallelSizes, most: StepSizes, *, num_pages: int, page_size: int) -> list[StepPlan]:
    """Prompts, one for each expert rank; decodes; a single decode. All are sampled, with log-probabilities.

    Reads may touch any page; writes go to the dummy page only.
    """
    pages = _page_of_each_expert_rank(sizes.expert, num_pages)[: min(most.rows, most.tokens)]
    prompt = max(1, min(most.length, most.tokens // len(pages)))
    decodes = np.resize(pages, min(most.rows, most.tokens))
    return [
        _plan(first_pages, num_pages - 1, tokens=tokens, page_size=page_size)
        for first_pages, tokens in ((pages, prompt), (decodes, 1), (pages[:1], 1))
    ]


def _page_of_each_expert_rank(expert_size: int, num_pages: int) -> Int32:
    """One page per expert rank, which its rows would start with; fewer if there are too few pages."""
    owners = expert_of_pages(np.arange(num_pages), expert_size)
    return np.unique(owners, return_index=True)[1].astype(np.int32)


def _plan(first_pages: Int32, dummy: int, *, page_size: int, tokens: int = 1, is_sampled: bool = True) -> StepPlan:
    """A plan of rows that begin with these pages and compute `tokens` tokens each, whose KV goes to page `dummy`."""
    rows = len(first_pages)
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
        needs_sample=np.full(rows, is_sampled),
        sampling=SamplingBatch(
            temperature=np.ones(rows, dtype=np.float32),
            top_k=np.zeros(rows, dtype=np.int32),
            top_p=np.full(rows, 0.9, dtype=np.float32),
            min_p=np.zeros(rows, dtype=np.float32),
            seeds=np.zeros(rows, dtype=np.uint64),
            positions=np.zeros(rows, dtype=np.int64),
            num_log_probs=np.full(rows, 0 if is_sampled else NO_LOG_PROBS, dtype=np.int32),
            prompt_targets=dict.fromkeys(range(rows), targets) if len(targets) else {},
        ),
    )
