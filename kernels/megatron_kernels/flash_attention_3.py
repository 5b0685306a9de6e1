"""Paged decode and prefill attention by FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), with the package
`flash_attn_interface`: bfloat16 and float16, compute capability 9.0.

It reads the same pages: its keys and values are views of the two halves of the cache.
"""

from __future__ import annotations

import torch
from flash_attn_interface import flash_attn_with_kvcache


def paged_decode(
    q_BHC: torch.Tensor,
    cache_PXE: torch.Tensor,
    block_table_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    num_kv_heads: int,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """As `paged_decode.paged_decode`."""
    keys_PXKC, values_PXKC = _halves(cache_PXE, num_kv_heads)
    out_B1HC: torch.Tensor = flash_attn_with_kvcache(
        q_BHC[:, None],
        keys_PXKC,
        values_PXKC,
        cache_seqlens=lengths_B,
        page_table=block_table_BM,
        softmax_scale=scale,
        causal=True,
        window_size=_window_size(window),
    )
    return out_B1HC[:, 0]


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
    """As `paged_prefill.paged_prefill`."""
    keys_PXKC, values_PXKC = _halves(cache_PXE, num_kv_heads)
    out_THC: torch.Tensor = flash_attn_with_kvcache(
        q_THC,
        keys_PXKC,
        values_PXKC,
        cache_seqlens=lengths_B,
        page_table=block_table_BM,
        cu_seqlens_q=query_starts_B,
        # An upper bound, because only the device has the lengths.
        max_seqlen_q=q_THC.shape[0],
        softmax_scale=scale,
        causal=True,
        window_size=_window_size(window),
    )
    is_padding_T11 = (torch.arange(q_THC.shape[0], device=q_THC.device) >= query_starts_B[-1])[:, None, None]
    return out_THC.masked_fill_(is_padding_T11, 0)


def _window_size(window: int | None) -> tuple[int, int]:
    """Return the tokens before and after the query's token; -1 means all."""
    return (-1, -1) if window is None else (window - 1, 0)


def _halves(cache_PXE: torch.Tensor, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys_PXKC, values_PXKC = cache_PXE.unflatten(2, (2, num_kv_heads, -1)).unbind(dim=2)
    return keys_PXKC, values_PXKC
