"""QK-norm, rotation and append in Triton; see `qk_norm_rope_append`. One program computes some heads of one token.

A row of the cache has keys and values in the same order as a row of qkv. So head N of qkv is written to position N - H
of the cache row. H is the number of query heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_kernels.tuning import heads_block, next_power_of_2


@triton.jit
def _normalize(first, second, weight, pairs, pairs_inside, epsilon, HALF: tl.constexpr):
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + epsilon)[:, None]
    first_weight = tl.load(weight + pairs, mask=pairs_inside, other=0.0).to(tl.float32)
    second_weight = tl.load(weight + HALF + pairs, mask=pairs_inside, other=0.0).to(tl.float32)
    return first * scale * first_weight[None, :], second * scale * second_weight[None, :]


@triton.jit
def _normalize_jointly(first, second, weight, heads, pairs, inside, mean_square, epsilon, HALF: tl.constexpr):
    scale = tl.rsqrt(tl.load(mean_square) + epsilon)
    place = weight + heads[:, None] * (2 * HALF) + pairs[None, :]
    first_weight = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second_weight = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    return first * scale * first_weight, second * scale * second_weight


@triton.jit
def _norm_rope_append(
    qkv,
    cos,
    sin,
    cache,
    slots,
    q_norm,
    k_norm,
    mean_squares,
    epsilon,
    stride_qkv,
    stride_cos,
    stride_sin,
    stride_page,
    stride_token,
    page_size,
    num_heads,
    num_kv_heads,
    HAS_NORM: tl.constexpr,
    IS_JOINT: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, PAIRS)
    pairs_inside = pairs < HALF
    is_query = heads < num_heads
    is_rotated = heads < num_heads + num_kv_heads
    inside = (heads < num_heads + 2 * num_kv_heads)[:, None] & pairs_inside[None, :]
    source = qkv + token * stride_qkv + heads[:, None] * (2 * HALF) + pairs[None, :]
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    cosine = tl.load(cos + token * stride_cos + pairs, mask=pairs_inside, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + token * stride_sin + pairs, mask=pairs_inside, other=0.0).to(tl.float32)[None, :]
    x, y = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        if IS_JOINT:
            queries = inside & is_query[:, None]
            keys = inside & (is_rotated & (heads >= num_heads))[:, None]
            means, own = mean_squares + 2 * token, heads - num_heads
            query_x, query_y = _normalize_jointly(x, y, q_norm, heads, pairs, queries, means, epsilon, HALF)
            key_x, key_y = _normalize_jointly(x, y, k_norm, own, pairs, keys, means + 1, epsilon, HALF)
        else:
            query_x, query_y = _normalize(x, y, q_norm, pairs, pairs_inside, epsilon, HALF)
            key_x, key_y = _normalize(x, y, k_norm, pairs, pairs_inside, epsilon, HALF)
        x = tl.where(is_query[:, None], query_x, key_x)
        y = tl.where(is_query[:, None], query_y, key_y)
    # Values are copied unchanged.
    new_first = tl.where(is_rotated[:, None], (x * cosine - y * sine).to(first.dtype), first)
    new_second = tl.where(is_rotated[:, None], (y * cosine + x * sine).to(first.dtype), second)
    queries_inside = inside & is_query[:, None]
    tl.store(source, new_first, mask=queries_inside)
    tl.store(source + HALF, new_second, mask=queries_inside)
    slot = tl.load(slots + token)
    if slot >= 0:
        row = cache + slot // page_size * stride_page + slot % page_size * stride_token
        place = row + (heads - num_heads)[:, None] * (2 * HALF) + pairs[None, :]
        cached_inside = inside & (heads >= num_heads)[:, None]
        tl.store(place, new_first, mask=cached_inside)
        tl.store(place + HALF, new_second, mask=cached_inside)


def qk_norm_rope_append(
    qkv_TQ: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    cache_PXE: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm_C: torch.Tensor | None = None,
    k_norm_C: torch.Tensor | None = None,
    mean_squares_T2: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> None:
    """Implement `qk_norm_rope_append.qk_norm_rope_append`."""
    num_all = num_heads + 2 * num_kv_heads
    half = cos_TF.shape[1]
    if qkv_TQ.shape[1] != num_all * 2 * half:
        raise ValueError(f"qkv has {qkv_TQ.shape[1]} columns: must be {num_all} heads x 2 x {half} (columns of cos)")
    if (q_norm_C is None) != (k_norm_C is None):
        raise ValueError("q_norm and k_norm must be given both or neither")
    tokens = qkv_TQ.shape[0]
    if tokens == 0:
        return
    heads = heads_block(tokens=tokens, num_heads=num_all, head_dim=2 * half)
    _norm_rope_append[(tokens, triton.cdiv(num_all, heads))](
        qkv_TQ,
        cos_TF,
        sin_TF,
        cache_PXE,
        slots_T,
        qkv_TQ if q_norm_C is None else q_norm_C,
        qkv_TQ if k_norm_C is None else k_norm_C,
        qkv_TQ if mean_squares_T2 is None else mean_squares_T2,
        epsilon,
        qkv_TQ.stride(0),
        cos_TF.stride(0),
        sin_TF.stride(0),
        cache_PXE.stride(0),
        cache_PXE.stride(1),
        cache_PXE.shape[1],
        num_heads,
        num_kv_heads,
        HAS_NORM=q_norm_C is not None,
        IS_JOINT=mean_squares_T2 is not None,
        HALF=half,
        PAIRS=next_power_of_2(half),
        HEADS=heads,
        num_warps=max(1, min(4, heads * half // 256)),
    )
