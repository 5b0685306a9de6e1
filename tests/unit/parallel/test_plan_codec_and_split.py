"""A step plan arrives at another rank unchanged, and the results of its parts make the whole."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.backends.native.executor import StepPlan, StepResult
from megatron_runtime.backends.native.micro_batches import cut, expert_of_pages, merge
from megatron_runtime.backends.native.ranked.plan_codec import pack, pack_frames, unpack, unpack_frames
from megatron_runtime.distributed.shard import ParallelSizes
from megatron_runtime.protocol.codec import MalformedMessageError
from megatron_runtime.sampling.batch import LogitEdits, Penalties, SamplingBatch
from megatron_runtime.sampling.sampler import LogProbs

PAGE = 4
DUMMY = 63


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = draw(st.integers(1, 7))
    lengths = np.array(draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows)), dtype=np.int32)
    tokens = int(lengths.sum())
    edits = {}
    if draw(st.booleans()):
        ids = rng.integers(0, 50, 3).astype(np.int32)
        edits[draw(st.integers(0, rows - 1))] = LogitEdits(
            Penalties(ids, ids, repetition=1.5, presence=0.25, frequency=0.0),
            bias_ids=ids,
            bias=rng.random(3).astype(np.float32),
            allowed=rng.integers(0, 9, 2).astype(np.uint32),
        )
    targets = {row: rng.integers(0, 50, 2).astype(np.int32) for row in range(0, rows, 3)}
    return StepPlan(
        token_ids=rng.integers(0, 99, tokens).astype(np.int32),
        positions=rng.integers(0, 99, tokens).astype(np.int32),
        query_lengths=lengths,
        context_lengths=lengths + rng.integers(0, 5, rows).astype(np.int32),
        block_tables=rng.integers(0, DUMMY, (rows, 3)).astype(np.int32),
        slot_mapping=rng.integers(0, DUMMY * PAGE, tokens),
        needs_sample=rng.random(rows) < 0.7,
        sampling=SamplingBatch(
            temperature=rng.random(rows).astype(np.float32),
            top_k=rng.integers(0, 9, rows).astype(np.int32),
            top_p=rng.random(rows).astype(np.float32),
            min_p=rng.random(rows).astype(np.float32),
            seeds=rng.integers(0, 2**64, rows, dtype=np.uint64),
            positions=rng.integers(0, 99, rows),
            num_log_probs=rng.integers(-1, 3, rows).astype(np.int32),
            returns_hidden=rng.random(rows) < 0.3,
            edits=edits,
            prompt_targets=targets,
        ),
    )


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if is_dataclass(one):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
        assert one.flags.writeable, "torch warns of memory that cannot be written"
    else:
        assert one == other


@given(plans())
def test_a_plan_arrives_as_it_was_sent(plan: StepPlan) -> None:
    assert_same(unpack(pack(plan)), plan)


def test_a_result_arrives_as_it_was_sent() -> None:
    found = LogProbs(np.ones(2, np.float32), np.zeros((2, 3), np.int32), np.full((2, 3), -1.5, np.float32))
    result = StepResult(
        np.array([4, -1], np.int32), {0: found}, {1: found}, {1: np.ones(4, np.float32)}, np.ones((3, 2, 2), np.uint8)
    )
    assert_same(unpack(pack(result)), result)


def test_the_byte_string_of_an_order_is_a_frame() -> None:
    data = b"\x93" * 100
    for order in (["write_blocks", np.arange(4, dtype=np.int32), data], [None, data], [data], ["confirm"], None):
        frames = pack_frames(order)
        assert frames[1:] == ([data] if order and order[-1] == data else [])
        found = unpack_frames(frames)
        assert type(found) is type(order)
        for one, other in zip(found or (), order or (), strict=True):
            assert_same(one, other)
    for malformed in ([], [pack(None), data]):
        with pytest.raises((ValueError, TypeError)):
            unpack_frames(malformed)


def test_nothing_but_plain_values_and_numbers_travels() -> None:
    with pytest.raises(TypeError, match="object cannot be sent"):
        pack(object())
    with pytest.raises(MalformedMessageError, match=r"an array of \|O8 cannot be sent"):
        unpack(pack(np.zeros(2)).replace(b"<f8", b"|O8"))
    with pytest.raises(MalformedMessageError, match="is not msgpack"):
        unpack(b"\xc1")
    with pytest.raises(MalformedMessageError, match="extension type 99 is unknown"):
        unpack(msgpack.packb(msgpack.ExtType(99, b"")))
    with pytest.raises(MalformedMessageError, match="zip"):  # fields are missing
        unpack(msgpack.packb(msgpack.ExtType(3, pack([1, 2]))))
    nested = b"\xc0"
    for _ in range(9):
        nested = msgpack.packb(msgpack.ExtType(3, nested))
    with pytest.raises(MalformedMessageError, match="nested extensions"):
        unpack(nested)


@given(plans(), st.integers(1, 4), st.integers(1, 3))
def test_each_row_is_run_once_and_results_come_back_to_it(plan: StepPlan, pipeline: int, expert: int) -> None:
    sizes = ParallelSizes(pipeline=pipeline, expert=expert)
    rows = len(plan.query_lengths)
    of_ranks = [cut(plan, sizes, expert_rank=rank, dummy_page=DUMMY, page_size=PAGE) for rank in range(expert)]
    # In lockstep: as many micro-batches everywhere, and each rank knows how many tokens the others have in each.
    assert len({len(batches) for batches in of_ranks}) == 1
    for together in zip(*of_ranks, strict=True):
        assert {batch.tokens_of_experts for batch in together} == {
            tuple(len(batch.plan.token_ids) for batch in together)
        }
    parts = []
    for rank, batches in enumerate(of_ranks):
        for batch in batches:
            if not len(batch.rows):
                assert batch.plan.slot_mapping.tolist() == [DUMMY * PAGE]
                assert not batch.plan.needs_sample.any()
                continue
            assert (expert_of_pages(plan.block_tables[:, 0], expert)[batch.rows] == rank).all()
            # A stand-in for the model: the row's first token, and its targets.
            starts = batch.plan.query_lengths.cumsum() - batch.plan.query_lengths
            told = {
                row: LogProbs(found.astype(np.float32), np.empty((2, 0), np.int32), np.empty((2, 0), np.float32))
                for row, found in batch.plan.sampling.prompt_targets.items()
            }
            hidden = {
                int(row): batch.plan.token_ids[starts[row] : starts[row] + 1].astype(np.float32)
                for row in np.flatnonzero(batch.plan.sampling.returns_hidden)
            }
            routing = batch.plan.token_ids[:, None, None].repeat(2, axis=1)
            parts.append((batch.rows, StepResult(batch.plan.token_ids[starts], {}, told, hidden, routing)))
    assert sorted(row for run, _ in parts for row in run) == list(range(rows))
    merged = merge(parts, plan)
    np.testing.assert_array_equal(merged.routing[:, 1, 0], plan.token_ids)
    starts = plan.query_lengths.cumsum() - plan.query_lengths
    np.testing.assert_array_equal(merged.tokens, plan.token_ids[starts])
    assert sorted(merged.hidden_states) == np.flatnonzero(plan.sampling.returns_hidden).tolist()
    for row, state in merged.hidden_states.items():
        assert state.tolist() == [plan.token_ids[starts[row]]]
    assert merged.prompt_log_probs.keys() == plan.sampling.prompt_targets.keys()
    for row, found in merged.prompt_log_probs.items():
        np.testing.assert_array_equal(found.chosen_N, plan.sampling.prompt_targets[row])


@given(plans(), st.integers(2, 4))
def test_rows_that_share_their_first_page_meet_on_one_rank(plan: StepPlan, expert: int) -> None:
    owners = expert_of_pages(plan.block_tables[:, 0], expert)
    assert owners.min() >= 0
    assert owners.max() < expert
    for page in set(plan.block_tables[:, 0].tolist()):
        assert len(set(owners[plan.block_tables[:, 0] == page].tolist())) == 1


def test_requests_are_spread_over_expert_ranks() -> None:
    first_pages = np.arange(0, 4000, 4, dtype=np.int32)
    plan = StepPlan(*[np.zeros(0)] * 4, first_pages[:, None], *[np.zeros(0)] * 3)  # type: ignore[arg-type]
    for expert in (2, 3, 8):
        counts = np.bincount(expert_of_pages(plan.block_tables[:, 0], expert))
        assert counts.min() > 0.8 * len(first_pages) / expert
