"""Tuning parameters are functions of shapes, within bounds for every shape."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_kernels import tuning

SIZES = st.integers(1, 300_000)


@given(width=SIZES)
def test_a_row_tile_holds_the_row(width):
    tile = tuning.row_tile(width)
    assert width <= tile.block < 2 * max(32, width)
    assert tile.num_warps <= 16


@given(
    batch=st.integers(0, 1024),
    kv_heads=st.integers(1, 64),
    head_dim=st.sampled_from([64, 128, 256]),
    max_tokens=SIZES,
    sms=st.integers(1, 200),
)
def test_splits_cover_the_longest_context(batch, kv_heads, head_dim, max_tokens, sms):
    cut = tuning.decode_tuning(
        batch=batch, num_kv_heads=kv_heads, head_dim=head_dim, max_tokens=max_tokens, num_sms=sms
    )
    assert cut.splits >= 1
    assert cut.split_tokens % cut.block_tokens == 0
    # The work is split evenly, and not further than a full device needs.
    assert cut.splits <= min(64, -(-max_tokens // cut.split_tokens))
    assert cut.splits == 1 or (cut.splits - 1) * batch * kv_heads < 2 * sms


def test_one_long_sequence_fills_an_h100():
    cut = tuning.decode_tuning(batch=1, num_kv_heads=8, head_dim=128, max_tokens=32768, num_sms=132)
    assert cut.splits * 8 >= 132


def test_a_large_batch_is_not_split():
    cut = tuning.decode_tuning(batch=64, num_kv_heads=8, head_dim=128, max_tokens=32768, num_sms=132)
    assert cut.splits == 1


@given(group=st.integers(1, 64), head_dim=st.sampled_from([64, 128, 256]))
def test_a_prefill_block_has_the_rows_of_a_tensor_core_tile(group, head_dim):
    cut = tuning.prefill_tuning(group=group, head_dim=head_dim)
    rows = cut.block_queries * tuning.next_power_of_2(group)
    assert tuning.MIN_DOT_ROWS <= rows <= 128


@given(number=SIZES)
def test_next_power_of_2(number):
    power = tuning.next_power_of_2(number)
    assert number <= power < 2 * number
    assert power & (power - 1) == 0


@given(width=SIZES)
def test_tiles_of_a_vocabulary_and_of_elements_are_bounded(width):
    assert tuning.vocabulary_tile(width, 2).block <= 4096
    assert tuning.elementwise_tile(width).block <= 1024


@given(tokens=SIZES, heads=st.integers(1, 200), head_dim=st.sampled_from([64, 80, 128]))
def test_programs_of_heads_are_small_for_few_tokens(tokens, heads, head_dim):
    block = tuning.heads_block(tokens=tokens, num_heads=heads, head_dim=head_dim)
    assert block * tuning.next_power_of_2(head_dim) <= 2048
    assert tokens >= 256 or block <= 4


@given(experts=st.integers(1, 4096))
def test_a_block_of_routing_is_bounded(experts):
    assert tuning.routing_block(experts) * tuning.next_power_of_2(experts) <= 8192
