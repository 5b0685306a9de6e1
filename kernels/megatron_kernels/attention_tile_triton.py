"""One step of the online softmax over a tile of cached tokens in Triton, for paged decode and paged prefill."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634

WIDEN_PRODUCTS = bool(triton.knobs.runtime.interpret)
"""Whether to widen operands to float32, because Triton's interpreter cannot multiply bfloat16.

Widening does not change the sums.
"""


def check_attention(q_RHC: torch.Tensor, cache_PXE: torch.Tensor, num_kv_heads: int) -> None:
    """Check the arguments from which the attention kernels compute addresses. R: number of query rows.

    Raises:
        ValueError: an argument is not valid. The message has the argument, its value and the allowed value.
    """
    num_heads, head_dim = q_RHC.shape[1:]
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} does not divide the {num_heads} heads of q")
    if cache_PXE.shape[2] != 2 * num_kv_heads * head_dim:
        raise ValueError(
            f"cache has {cache_PXE.shape[2]} elements a token: must be 2 x {num_kv_heads} heads x {head_dim}"
        )
    if q_RHC.dtype is not cache_PXE.dtype:
        raise ValueError(f"q is {q_RHC.dtype} and the cache {cache_PXE.dtype}: must be of one type")
    if q_RHC.stride(2) != 1 or cache_PXE.stride(2) != 1:
        raise ValueError("q and cache must be contiguous in their last dimension")


@triton.jit
def softmax_step(
    queries,
    largest,
    total,
    sums,
    cache,
    block_table,
    first,
    stop,
    last_seen,
    scale_log2,
    head_offset,
    value_offset,
    stride_page,
    stride_token,
    dims,
    dims_inside,
    window,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend from `queries` [R, C] to the cached tokens first … first + BLOCK_TOKENS - 1, and return the new state.

    largest, total, sums: the state of the online softmax: maximum [R], sum of weights [R], weighted sum of values [R,
                          C].
    stop: number of cached tokens.
    last_seen: [R], index of the last token to which each row attends. Used only if MASKED is set. Without MASKED, all
               tokens of the tile are cached, and every row attends to all of them.
    window:    number of tokens to which a row attends, counted back from last_seen. Used only if WINDOWED is set, which
               requires MASKED. Without WINDOWED, each row must attend to a token of this tile or of an earlier tile.
    """
    tokens = first + tl.arange(0, BLOCK_TOKENS)
    present = tokens < stop
    pages = tl.load(block_table + tokens // PAGE_SIZE, mask=present, other=0).to(tl.int64)
    places = pages * stride_page + (tokens % PAGE_SIZE) * stride_token + head_offset
    keys_at = cache + places[:, None] + dims[None, :]
    inside = present[:, None] & dims_inside[None, :]
    keys = tl.load(keys_at, mask=inside, other=0.0)
    values = tl.load(keys_at + value_offset, mask=inside, other=0.0)
    if WIDEN:
        keys = keys.to(tl.float32)
        values = values.to(tl.float32)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
    if MASKED:
        visible = present[None, :] & (tokens[None, :] <= last_seen[:, None])
        if WINDOWED:
            visible = visible & (tokens[None, :] > last_seen[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    finite = new_largest
    if WINDOWED:
        finite = tl.where(new_largest > float("-inf"), new_largest, 0.0)
    weights = tl.exp2(scores - finite[:, None])
    correction = tl.exp2(largest - finite)
    total = total * correction + tl.sum(weights, axis=1)
    sums = sums * correction[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_largest, total, sums
