"""How a step plan is cut: which rows an expert rank runs, and in which micro-batches they pass the pipeline. No torch.

Every rank cuts the same plan in the same way, so nobody has to be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_runtime.backends.native.executor import StepPlan, StepResult
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.sampling.batch import NO_LOG_PROBS, SamplingBatch
from megatron_runtime.sampling.log_probs import LogProbs

_SPREAD = 2654435761  # Knuth's multiplier: neighbouring pages land on different ranks

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What passes the pipeline at once.

    plan: of this expert rank's rows; without any, one token in the dummy page, because the others wait for it.
    rows: the rows of the whole plan that these are; empty for a dummy.
    tokens_of_experts: tokens that each expert rank runs meanwhile.
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
    batches = []
    for index in range(count):
        tokens = tuple(max(1, int(plan.query_lengths[part[index]].sum())) for part in parts)
        rows = parts[expert_rank][index]
        mine = take(plan, rows) if len(rows) else _dummy(dummy_page, page_size)
        batches.append(MicroBatch(mine, rows, tokens))
    return batches


def expert_of_rows(plan: StepPlan, expert_size: int) -> Rows:
    """The expert rank that runs each row: the one its first page falls to.

    Requests that share cached KV share their first page, so they meet on one rank; a request keeps its first page
    while it runs, so its KV stays where it is.
    """
    if expert_size == 1:
        return np.zeros(len(plan.query_lengths), dtype=np.int64)
    return expert_of_pages(plan.block_tables[:, 0], expert_size)


def expert_of_pages(pages: npt.NDArray[np.integer[Any]], expert_size: int) -> Rows:
    """The expert rank of rows whose first pages these are."""
    spread = pages.astype(np.uint64) * np.uint64(_SPREAD) % np.uint64(1 << 32)
    return (spread >> np.uint64(16)).astype(np.int64) % expert_size


def take(plan: StepPlan, rows: Rows) -> StepPlan:
    """A plan of these rows alone."""
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
            temperature=batch.temperature[rows],
            top_k=batch.top_k[rows],
            top_p=batch.top_p[rows],
            min_p=batch.min_p[rows],
            seeds=batch.seeds[rows],
            positions=batch.positions[rows],
            num_log_probs=batch.num_log_probs[rows],
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
    """`rows` in `count` parts of about equally many tokens, in order; empty ones where there are too few rows."""
    if count == 1:
        return [rows]
    ends = plan.query_lengths[rows].cumsum()
    total = int(ends[-1]) if len(rows) else 0
    # A row belongs to the part in which its middle token lies.
    middles = ends - plan.query_lengths[rows] / 2
    part_of_row = np.minimum((middles * count / max(total, 1)).astype(np.int64), count - 1)
    return [rows[part_of_row == part] for part in range(count)]


def _dummy(page: int, page_size: int) -> StepPlan:
    """One token whose key and value go where nobody looks. Nothing of it is sampled."""
    one = np.ones(1, dtype=np.int32)
    zero, zero_float = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)
    return StepPlan(
        token_ids=zero,
        positions=zero,
        query_lengths=one,
        context_lengths=one,
        block_tables=np.full((1, 1), page, dtype=np.int32),
        slot_mapping=np.full(1, page * page_size, dtype=np.int64),
        needs_sample=np.zeros(1, dtype=np.bool_),
        sampling=SamplingBatch(
            temperature=zero_float,
            top_k=zero,
            top_p=zero_float,
            min_p=zero_float,
            seeds=np.zeros(1, dtype=np.uint64),
            positions=np.zeros(1, dtype=np.int64),
            num_log_probs=np.full(1, NO_LOG_PROBS, dtype=np.int32),
        ),
    )
