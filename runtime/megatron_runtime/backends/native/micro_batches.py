"""Splits the rows of a step plan among the expert ranks, and the rows of each expert rank into micro-batches.

Every rank splits the same plan in the same way, so the ranks need no communication. `warm_up_plans` returns plans
without requests. The ranks run these plans after the first load, so that a request's first step need not compile
kernels, allocate buffers or open connections. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_runtime.backends.native.executor import Int32, Int64, StepPlan, StepResult
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.sampling.batch import NO_LOG_PROBS, LogitEdits, SamplingBatch
from megatron_runtime.sampling.sampler import LogProbs

_SPREAD = 2654435761  # Knuth's multiplicative hash: assigns neighbouring pages to different ranks

_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions", "num_log_probs", "returns_hidden")

Rows = Int64


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The part of a plan that one expert rank computes at a time.

    plan: the plan of this expert rank's rows. If the rank has no rows, the plan has one token in the dummy page,
          because the other expert ranks wait for this rank.
    rows: row numbers in the whole plan; empty for the dummy token.
    tokens_of_experts: number of tokens of each expert rank in this micro-batch.
    """

    plan: StepPlan
    rows: Rows
    tokens_of_experts: tuple[int, ...]


def cut(plan: StepPlan, sizes: ParallelSizes, *, expert_rank: int, dummy_page: int, page_size: int) -> list[MicroBatch]:
    """Split the rows of `plan` that belong to `expert_rank` into micro-batches, and return the micro-batches.

    Every expert rank has the same number of micro-batches.

    dummy_page: page of the dummy token (see MicroBatch).
    """
    if sizes.expert == 1 and sizes.pipeline == 1:
        return [MicroBatch(plan, np.arange(len(plan.query_lengths)), (len(plan.token_ids),))]
    owners = expert_of_pages(plan.block_tables[:, 0], sizes.expert)
    of_experts = [np.flatnonzero(owners == rank) for rank in range(sizes.expert)]
    count = max(1, min(sizes.pipeline, max(map(len, of_experts))))
    parts = [_balanced(plan, rows, count) for rows in of_experts]
    dummy = _plan(np.array([dummy_page], dtype=np.int32), dummy_page, page_size=page_size, is_sampled=False)
    batches = []
    for index in range(count):
        tokens = tuple(max(1, int(plan.query_lengths[part[index]].sum())) for part in parts)
        rows = parts[expert_rank][index]
        batches.append(MicroBatch(take(plan, rows) if len(rows) else dummy, rows, tokens))
    return batches


def expert_of_pages(pages: npt.NDArray[np.integer[Any]], expert_size: int) -> Rows:
    """Return, for each row, the expert rank that runs the row. pages: the first page of each row.

    Requests that share cached KV share their first page, so one rank runs all of them. A request keeps its first page
    while it runs, so its KV stays on one rank.
    """
    spread = pages.astype(np.uint64) * np.uint64(_SPREAD) % np.uint64(1 << 32)
    return (spread >> np.uint64(16)).astype(np.int64) % expert_size


def take(plan: StepPlan, rows: Rows) -> StepPlan:
    """Return a plan that has only `rows` of `plan`."""
    if len(rows) == len(plan.query_lengths):
        return plan
    tokens = plan.tokens_of(rows)
    batch, places = plan.sampling, {int(row): index for index, row in enumerate(rows)}
    return StepPlan(
        token_ids=plan.token_ids[tokens],
        positions=plan.positions[tokens],
        query_lengths=plan.query_lengths[rows],
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


def merge(parts: Sequence[tuple[Rows, StepResult]], plan: StepPlan) -> StepResult:
    """Return the result of the whole plan, merged from the results of its parts.

    parts: for each part, its row numbers in the plan, and its result.
    """
    num_rows = len(plan.query_lengths)
    if len(parts) == 1 and len(parts[0][0]) == num_rows:
        return parts[0][1]
    tokens = np.full(num_rows, -1, dtype=np.int32)
    found: dict[int, LogProbs] = {}
    of_prompts: dict[int, LogProbs] = {}
    hidden: dict[int, npt.NDArray[Any]] = {}
    routing: npt.NDArray[Any] | None = None
    for rows, result in parts:
        tokens[rows] = result.tokens
        found |= {int(rows[row]): value for row, value in result.log_probs.items()}
        of_prompts |= {int(rows[row]): value for row, value in result.prompt_log_probs.items()}
        hidden |= {int(rows[row]): value for row, value in result.hidden_states.items()}
        if result.routing is not None:
            if routing is None:
                routing = np.empty((len(plan.token_ids), *result.routing.shape[1:]), dtype=result.routing.dtype)
            routing[plan.tokens_of(rows)] = result.routing
    return StepResult(tokens, found, of_prompts, hidden, routing)


def _balanced(plan: StepPlan, rows: Rows, count: int) -> list[Rows]:
    """Split `rows`, in order, into `count` parts with similar numbers of tokens. Parts can be empty."""
    ends = plan.query_lengths[rows].cumsum()
    total = int(ends[-1]) if len(rows) else 0
    # A row belongs to the part that contains the row's middle token.
    middles = ends - plan.query_lengths[rows] / 2
    part_of_row = np.minimum((middles * count / max(total, 1)).astype(np.int64), count - 1)
    return [rows[part_of_row == part] for part in range(count)]


_MAX_TARGETS = 64
"""Number of prompt tokens of a warm-up row whose log-probabilities are computed."""
_BIAS = LogitEdits(bias_ids=np.zeros(1, np.int32), bias=np.ones(1, np.float32))
"""Edits of a warm-up row. The token of a row with a bias is drawn after the step, from edited logits."""


class StepLimits(NamedTuple):
    """The limits of a step: the number of tokens, the number of rows, and the number of tokens in one row."""

    tokens: int
    rows: int
    length: int


CPU = StepLimits(tokens=32, rows=8, length=32)
"""Limits on a CPU. Steps of this size take a few seconds with a large model."""
GPU = StepLimits(tokens=8192, rows=64, length=8192)
"""Limits on a GPU. Steps of this size compile all variants of each kernel.

Some kernels have variants for few and for many tokens.
"""
FEW_TOKENS = 64
"""Number of tokens in a warm-up step of short prompts on a GPU."""


def warm_up_plans(sizes: ParallelSizes, limits: StepLimits, *, num_pages: int, page_size: int) -> list[StepPlan]:
    """Return the warm-up plans, which are plans of these kinds:

    - prompts with the maximum number of tokens of a step,
    - prompts with FEW_TOKENS tokens, if that is less than the maximum,
    - several decodes,
    - a single decode.

    Every row is sampled with log-probabilities, and one row has a bias. The plans read any page but write only to the
    dummy page.
    """
    rows = min(limits.rows, limits.tokens)
    # The first page of the rows of each expert rank. Some ranks get no page if there are too few.
    owners = expert_of_pages(np.arange(num_pages), sizes.expert)
    pages = np.unique(owners, return_index=True)[1].astype(np.int32)[:rows]

    def prompts(tokens: int) -> tuple[Int32, int]:
        count = min(rows, max(len(pages), -(-tokens // limits.length)))
        return np.resize(pages, count), max(1, min(limits.length, tokens // count))

    few = [prompts(FEW_TOKENS)] if limits.tokens > FEW_TOKENS else []
    return [
        _plan(first_pages, num_pages - 1, tokens=tokens, page_size=page_size)
        for first_pages, tokens in (prompts(limits.tokens), *few, (np.resize(pages, rows), 1), (pages[:1], 1))
    ]


def _plan(first_pages: Int32, dummy: int, *, page_size: int, tokens: int = 1, is_sampled: bool = True) -> StepPlan:
    """Return a plan that has, for each of `first_pages`, a row of `tokens` tokens.

    The KV of these tokens goes to page `dummy`.
    """
    rows = len(first_pages)
    lengths = np.full(rows, tokens, dtype=np.int32)
    positions = np.tile(np.arange(tokens, dtype=np.int32), rows)
    tables = np.full((rows, -(-tokens // page_size)), dummy, dtype=np.int32)
    tables[:, 0] = first_pages
    slots: Int64 = dummy * page_size + positions.astype(np.int64) % page_size
    targets = np.zeros(min(tokens - 1, _MAX_TARGETS), dtype=np.int32)
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
            returns_hidden=np.zeros(rows, dtype=np.bool_),
            edits={0: _BIAS} if is_sampled else {},
            prompt_targets=dict.fromkeys(range(rows), targets) if len(targets) else {},
        ),
    )
