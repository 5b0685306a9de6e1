"""Causal attention of several new tokens per sequence over a paged KV cache, which already contains the new tokens.

Shapes: T new tokens of all B sequences, concatenated; H query heads, K key-value heads, C head size, P pages, X tokens
        per page, E = 2 K C values per cached token (the keys of all heads, then the values), M entries in the longest
        block table.
Types:  as in `paged_decode`.
Bound: compute for long prompts; FLOPs = 4 H C times the sum over sequences of (n L - n (n - 1) / 2), for n new tokens
       in a context of L tokens. New token i attends to L - n + i + 1 tokens, with 2 C FLOPs for each score and 2 C for
       each value.
Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691) over pages. The query blocks of all sequences are in one launch,
        whose size does not depend on their lengths, as in vLLM's unified attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def flops(query_lengths: Sequence[int], lengths: Sequence[int], *, num_heads: int, head_dim: int) -> int:
    seen = sum(new * length - new * (new - 1) // 2 for new, length in zip(query_lengths, lengths, strict=True))
    return 4 * num_heads * head_dim * seen


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
) -> torch.Tensor:
    """Return softmax(scale · q · kᵀ) · v, [T, H, C]. A new token attends to itself and the tokens before it.

    lengths_B: number of cached tokens of each sequence, including the new tokens at its end.
    query_starts_B: int32 [B + 1], ascending; the row of each sequence's first new token, then the row after all new
                    tokens. The rows of `q_THC` from query_starts_B[-1] on are padding, and their results are zeros.
    window:         maximum number of tokens that a new token attends to, including itself; None means all.
    """
    _, num_heads, head_dim = q_THC.shape
    page_size = cache_PXE.shape[1]
    group = num_heads // num_kv_heads
    factor = head_dim**-0.5 if scale is None else scale
    out_THC = q_THC.new_zeros(q_THC.shape)
    starts = query_starts_B.tolist()
    for row, (start, stop, length) in enumerate(zip(starts, starts[1:], lengths_B.tolist(), strict=False)):
        if start == stop:
            continue
        pages = block_table_BM[row, : -(-length // page_size)].long()
        kv_SJKC = cache_PXE[pages].flatten(0, 1)[:length].unflatten(1, (2, num_kv_heads, head_dim)).float()
        keys_HSC, values_HSC = kv_SJKC.permute(1, 2, 0, 3).repeat_interleave(group, dim=1)
        scores_HNS = torch.einsum("nhc,hsc->hns", q_THC[start:stop].float(), keys_HSC) * factor
        positions_N1 = torch.arange(length - (stop - start), length, device=q_THC.device)[:, None]
        tokens_S = torch.arange(length, device=q_THC.device)
        is_hidden_NS = tokens_S > positions_N1
        if window is not None:
            is_hidden_NS |= tokens_S <= positions_N1 - window
        weights_HNS = scores_HNS.masked_fill(is_hidden_NS, float("-inf")).softmax(dim=-1)
        out_THC[start:stop] = torch.einsum("hns,hsc->nhc", weights_HNS, values_HSC).to(q_THC.dtype)
    return out_THC
