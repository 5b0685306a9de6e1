"""Paged causal prefill attention in Triton; see `paged_prefill`.

A program computes a block of new tokens of one sequence for one key-value head. The rows of a program are pairs (token,
query head of the group), so that keys and values are read once for the group. floor(T / block) + B programs per head
suffice for any lengths of the sequences. A program finds its sequence on the device by bisection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_kernels.attention_tile_triton import LOG2_E, WIDEN_PRODUCTS, check_attention, softmax_step
from megatron_kernels.tuning import MIN_DOT_ROWS, PrefillTuning, next_power_of_2, prefill_tuning


@triton.jit
def _find_sequence(starts, block, num_sequences, BLOCK_QUERIES: tl.constexpr):
    """Return the sequence to which a block of new tokens belongs.

    This is the last sequence whose first block is not after `block`. The first block of sequence b is starts[b] //
    BLOCK_QUERIES + b, because the last block of every earlier sequence can be partly filled.
    """
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK_QUERIES + middle <= block:
            low = middle
        else:
            high = middle
    return low


# Triton must not specialise on these addresses, because the first sequence can be any row of the tables.
@triton.jit(
    do_not_specialize=["num_sequences", "stride_table", "window"],
    do_not_specialize_on_alignment=["block_table", "lengths"],
)
def _prefill_block(
    q,
    cache,
    block_table,
    lengths,
    starts,
    out,
    scale_log2,
    num_sequences,
    stride_q_row,
    stride_q_head,
    stride_page,
    stride_token,
    stride_table,
    num_kv_heads,
    window,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # The last rows of a prompt attend to the most tokens. They start first, so that they do not finish last.
    block, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sequence = _find_sequence(starts, block, num_sequences, BLOCK_QUERIES)
    start = tl.load(starts + sequence)
    num_queries = tl.load(starts + sequence + 1) - start
    first_query = (block - (start // BLOCK_QUERIES + sequence)) * BLOCK_QUERIES
    if first_query >= num_queries:
        return
    rows, dims = tl.arange(0, BLOCK_QUERIES * PADDED_GROUP), tl.arange(0, DIMS)
    queries_of_rows, group_rows = first_query + rows // PADDED_GROUP, rows % PADDED_GROUP
    heads = kv_head * GROUP + group_rows
    dims_inside = dims < HEAD_DIM
    inside = ((queries_of_rows < num_queries) & (group_rows < GROUP))[:, None] & dims_inside[None, :]
    row_index = (start + queries_of_rows).to(tl.int64)
    queries = tl.load(
        q + row_index[:, None] * stride_q_row + heads[:, None] * stride_q_head + dims[None, :], mask=inside, other=0.0
    )
    if WIDEN:
        queries = queries.to(tl.float32)
    cached = tl.load(lengths + sequence) - num_queries
    last_seen = cached + queries_of_rows
    stop = tl.minimum(cached + first_query + BLOCK_QUERIES, cached + num_queries)
    whole = (cached + first_query + 1) // BLOCK_TOKENS * BLOCK_TOKENS
    begin = 0
    if WINDOWED:
        begin = tl.maximum(cached + first_query + 1 - window, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    table = block_table + sequence.to(tl.int64) * stride_table
    largest = tl.full((BLOCK_QUERIES * PADDED_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_QUERIES * PADDED_GROUP,), tl.float32)
    sums = tl.zeros((BLOCK_QUERIES * PADDED_GROUP, DIMS), tl.float32)
    for first in range(begin, whole, BLOCK_TOKENS):
        largest, total, sums = softmax_step(
            queries,
            largest,
            total,
            sums,
            cache,
            table,
            first,
            stop,
            last_seen,
            scale_log2,
            kv_head * HEAD_DIM,
            num_kv_heads * HEAD_DIM,
            stride_page,
            stride_token,
            dims,
            dims_inside,
            window,
            PAGE_SIZE,
            BLOCK_TOKENS,
            WINDOWED,
            WINDOWED,
            WIDEN,
        )
    for first in range(whole, stop, BLOCK_TOKENS):
        largest, total, sums = softmax_step(
            queries,
            largest,
            total,
            sums,
            cache,
            table,
            first,
            stop,
            last_seen,
            scale_log2,
            kv_head * HEAD_DIM,
            num_kv_heads * HEAD_DIM,
            stride_page,
            stride_token,
            dims,
            dims_inside,
            window,
            PAGE_SIZE,
            BLOCK_TOKENS,
            True,
            WINDOWED,
            WIDEN,
        )
    if WINDOWED:
        total = tl.where(total > 0.0, total, 1.0)  # a row after the last query can have attended to no token
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    out_row = row_index * num_kv_heads * GROUP + heads
    tl.store(out + out_row[:, None] * HEAD_DIM + dims[None, :], result, inside)


def paged_prefill(
    q_THC: torch.Tensor,
    cache_PXE: torch.Tensor,
    block_table_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    query_starts_B: torch.Tensor,
    *,
    num_kv_heads: int,
    scale: float | None = None,
    window: int | None = None,
    tuning: PrefillTuning | None = None,
) -> torch.Tensor:
    """Implement `paged_prefill.paged_prefill`. tuning: None uses the default tuning for the shape."""
    check_attention(q_THC, cache_PXE, num_kv_heads)
    tokens, num_heads, head_dim = q_THC.shape
    batch, group = len(lengths_B), num_heads // num_kv_heads
    if tuning is None:
        tuning = prefill_tuning(group=group, head_dim=head_dim)
    padded_group = next_power_of_2(group)
    block_queries = max(tuning.block_queries, MIN_DOT_ROWS // padded_group)
    out_THC = q_THC.new_zeros(tokens, num_heads, head_dim)
    if tokens == 0 or batch == 0:
        return out_THC
    _prefill_block[(tokens // block_queries + batch, num_kv_heads)](
        q_THC,
        cache_PXE,
        block_table_BM,
        lengths_B,
        query_starts_B,
        out_THC,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        batch,
        q_THC.stride(0),
        q_THC.stride(1),
        cache_PXE.stride(0),
        cache_PXE.stride(1),
        block_table_BM.stride(0),
        num_kv_heads,
        window or 0,
        GROUP=group,
        PADDED_GROUP=padded_group,
        BLOCK_QUERIES=block_queries,
        HEAD_DIM=head_dim,
        DIMS=next_power_of_2(head_dim),
        PAGE_SIZE=cache_PXE.shape[1],
        BLOCK_TOKENS=tuning.block_tokens,
        WINDOWED=window is not None,
        WIDEN=WIDEN_PRODUCTS,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    return out_THC
