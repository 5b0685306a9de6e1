"""Paged decode attention in Triton; see `paged_decode`.

A program computes one part of one sequence for one key-value head. The query heads that share this key-value head are
the rows of one matrix product, so that keys and values are read once. The rows are padded to a tensor-core tile. The
launch depends only on shapes, so that a CUDA graph can capture the launch. Programs read lengths on the device. A
program beyond the end of a sequence returns immediately.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_kernels.attention_tile_triton import LOG2_E, WIDEN_PRODUCTS, check_attention, softmax_step
from megatron_kernels.tuning import MIN_DOT_ROWS, DecodeTuning, decode_tuning, next_power_of_2

REDUCE_BLOCK = 16
"""Number of parts that one step of the reduction adds."""


@triton.jit(do_not_specialize=["num_splits", "split_tokens", "stride_table", "window"])
def _decode_part(
    q,
    cache,
    block_table,
    lengths,
    out,
    parts,
    logs,
    scale_log2,
    num_splits,
    split_tokens,
    stride_q_row,
    stride_q_head,
    stride_page,
    stride_token,
    stride_table,
    num_kv_heads,
    window,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute one part of a sequence for one key-value head.

    If there is only one part, write its result to `out` [B, H, C]. Otherwise, write the normalized result of the part
    to `parts` [B, H, splits, C], and the base-2 logarithm of the sum of the part's weights to `logs` [B, H, splits].
    For an empty part, write only the logarithm, -inf.
    """
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    heads = kv_head * GROUP + rows
    head_index = sequence.to(tl.int64) * num_kv_heads * GROUP + heads
    row_inside, dims_inside = rows < GROUP, dims < HEAD_DIM
    inside = row_inside[:, None] & dims_inside[None, :]
    length = tl.load(lengths + sequence)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(length - window, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    share = tl.cdiv(tl.cdiv(length - begin, num_splits), BLOCK_TOKENS) * BLOCK_TOKENS
    share = tl.maximum(share, split_tokens)
    start = begin + split * share
    stop = tl.minimum(start + share, length)
    if start >= stop:
        if HAS_PARTS:
            nothing = tl.full((ROWS,), float("-inf"), tl.float32)
            tl.store(logs + head_index * num_splits + split, nothing, row_inside)
        else:
            tl.store(out + head_index[:, None] * HEAD_DIM + dims[None, :], tl.zeros((ROWS, DIMS), tl.float32), inside)
        return
    q_at = q + sequence.to(tl.int64) * stride_q_row + heads[:, None] * stride_q_head + dims[None, :]
    queries = tl.load(q_at, mask=inside, other=0.0)
    if WIDEN:
        queries = queries.to(tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIMS), tl.float32)
    last_seen = tl.full((ROWS,), 0, tl.int32) + (length - 1)
    for first in range(start, stop, BLOCK_TOKENS):
        largest, total, sums = softmax_step(
            queries,
            largest,
            total,
            sums,
            cache,
            block_table + sequence.to(tl.int64) * stride_table,
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
    result = sums / total[:, None]
    if HAS_PARTS:
        part = head_index * num_splits + split
        tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], result, inside)
        tl.store(logs + part, largest + tl.log2(total), row_inside)
    else:
        out_at = out + head_index[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_splits"])
def _reduce_parts(parts, logs, out, num_splits, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the result of one head from the normalized results of its parts, in the order of the tokens.

    The result is a sum. Each part's result is multiplied by the part's share of the sum of all weights. Empty parts at
    the end add zero.
    """
    head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIMS)
    largest = tl.full((), float("-inf"), tl.float32)
    for first in range(0, num_splits, BLOCK):
        splits = first + tl.arange(0, BLOCK)
        logarithms = tl.load(logs + head * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(logarithms, axis=0))
    largest = tl.where(largest > float("-inf"), largest, 0.0)
    total = tl.full((), 0.0, tl.float32)
    sums = tl.zeros((DIMS,), tl.float32)
    for first in range(0, num_splits, BLOCK):
        splits = first + tl.arange(0, BLOCK)
        logarithms = tl.load(logs + head * num_splits + splits, mask=splits < num_splits, other=float("-inf"))
        weights = tl.exp2(logarithms - largest)
        # The memory of an empty part is not initialised.
        inside = (logarithms > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
        values_at = parts + (head * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :]
        total += tl.sum(weights, axis=0)
        sums += tl.sum(weights[:, None] * tl.load(values_at, mask=inside, other=0.0), axis=0)
    result = sums / tl.where(total > 0.0, total, 1.0)
    tl.store(out + head * HEAD_DIM + dims, result.to(out.dtype.element_ty), dims < HEAD_DIM)


def paged_decode(
    q_BHC: torch.Tensor,
    cache_PXE: torch.Tensor,
    block_table_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    num_kv_heads: int,
    scale: float | None = None,
    window: int | None = None,
    tuning: DecodeTuning | None = None,
) -> torch.Tensor:
    """Implement `paged_decode.paged_decode`. tuning: None uses the default tuning for the shape."""
    check_attention(q_BHC, cache_PXE, num_kv_heads)
    batch, num_heads, head_dim = q_BHC.shape
    if tuning is None:
        tuning = decode_tuning(
            batch=batch,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_tokens=block_table_BM.shape[1] * cache_PXE.shape[1],
            num_sms=_num_sms(q_BHC.device),
        )
    out_BHC = q_BHC.new_empty(batch, num_heads, head_dim)
    if batch == 0:
        return out_BHC
    splits = tuning.splits
    has_parts = splits > 1
    parts_BHSC = q_BHC.new_empty(batch, num_heads, splits, head_dim, dtype=torch.float32) if has_parts else out_BHC
    logs_BHS = q_BHC.new_empty(batch, num_heads, splits, dtype=torch.float32) if has_parts else out_BHC
    dims = next_power_of_2(head_dim)
    _decode_part[(batch, num_kv_heads, splits)](
        q_BHC,
        cache_PXE,
        block_table_BM,
        lengths_B,
        out_BHC,
        parts_BHSC,
        logs_BHS,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        splits,
        tuning.split_tokens,
        q_BHC.stride(0),
        q_BHC.stride(1),
        cache_PXE.stride(0),
        cache_PXE.stride(1),
        block_table_BM.stride(0),
        num_kv_heads,
        window or 0,
        GROUP=num_heads // num_kv_heads,
        ROWS=max(MIN_DOT_ROWS, next_power_of_2(num_heads // num_kv_heads)),
        HEAD_DIM=head_dim,
        DIMS=dims,
        PAGE_SIZE=cache_PXE.shape[1],
        BLOCK_TOKENS=tuning.block_tokens,
        HAS_PARTS=has_parts,
        WINDOWED=window is not None,
        WIDEN=WIDEN_PRODUCTS,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if has_parts:
        _reduce_parts[(batch * num_heads,)](
            parts_BHSC,
            logs_BHS,
            out_BHC,
            splits,
            HEAD_DIM=head_dim,
            DIMS=dims,
            BLOCK=REDUCE_BLOCK,
            num_warps=4,
        )
    return out_BHC


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
