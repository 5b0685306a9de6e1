"""The warm-up steps of ranks: they fit the engine, disturb no request, and every rank takes part."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.backends.native.micro_batches import (
    CPU,
    GPU,
    StepLimits,
    cut,
    expert_of_pages,
    warm_up_plans,
)
from megatron_runtime.distributed.shard import ParallelSizes

PAGE = 16


@given(
    st.integers(1, 4),
    st.builds(StepLimits, tokens=st.integers(1, 600), rows=st.integers(1, 70), length=st.integers(2, 600)),
    st.integers(2, 300),
    st.sampled_from([CPU, GPU]),
)
def test_warm_up_plans_fit_the_engine_and_write_to_the_dummy_page_only(
    expert: int, maximum: StepLimits, num_pages: int, usual: StepLimits
) -> None:
    for plan in warm_up_plans(
        ParallelSizes(expert=expert), StepLimits(*map(min, usual, maximum)), num_pages=num_pages, page_size=PAGE
    ):
        rows, tokens = len(plan.query_lengths), len(plan.token_ids)
        assert 1 <= rows <= maximum.rows
        assert 1 <= tokens <= maximum.tokens
        assert tokens == len(plan.positions) == len(plan.slot_mapping) == plan.query_lengths.sum()
        assert plan.positions.max() < maximum.length
        assert set((plan.slot_mapping // PAGE).tolist()) == {num_pages - 1}
        assert plan.block_tables.shape == (rows, -(-plan.context_lengths.max() // PAGE))
        assert plan.block_tables.max() < num_pages


def test_every_rank_that_shares_experts_samples_prompts_and_decodes() -> None:
    sizes = ParallelSizes(expert=4)
    plans = warm_up_plans(sizes, CPU, num_pages=100, page_size=PAGE)
    for plan in plans[:2]:
        assert set(expert_of_pages(plan.block_tables[:, 0], 4).tolist()) == {0, 1, 2, 3}
    prompts, decodes, one = plans
    assert prompts.query_lengths.tolist() == [8] * 4
    assert {row: len(targets) for row, targets in prompts.sampling.prompt_targets.items()} == dict.fromkeys(range(4), 7)
    assert decodes.query_lengths.tolist() == [1] * 8
    assert one.query_lengths.tolist() == [1]
    for rank in range(4):
        (batch,) = cut(prompts, sizes, expert_rank=rank, dummy_page=99, page_size=PAGE)
        assert batch.tokens_of_experts == (8, 8, 8, 8)
        assert np.all(batch.plan.needs_sample)
