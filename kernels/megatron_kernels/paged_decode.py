"""Attention of one new token per sequence over a paged KV cache.

Shapes: B sequences, H query heads, K key-value heads (H is a multiple of K), C head size, P pages, X tokens per page, E
        = 2 K C values per cached token (the keys of all heads, then the values), M entries in the longest block table,
        S cached tokens.
Types: float32, bfloat16 or float16, the same for queries and cache; block tables and lengths int32. Products accumulate
       in float32, the softmax is float32, and the result is rounded once.
Bound:  memory; bytes = (S E + 2 B H C) s, with S the sum of the lengths. Every cached key and value is read once for
        all query heads that share it.
Source: split-KV with a second reduction is Flash-Decoding (Dao et al. 2023); pages are vLLM's PagedAttention (Kwon et
        al. 2023, arXiv:2309.06180); the online softmax is Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

import torch


def bytes_moved(lengths: list[int], *, num_heads: int, num_kv_heads: int, head_dim: int, element_size: int) -> int:
    cached = sum(lengths) * 2 * num_kv_heads * head_dim
    return (cached + 2 * len(lengths) * num_heads * head_dim) * element_size


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
    """Return softmax(scale · q · kᵀ) · v, [B, H, C].

    q_BHC:     queries; can be a strided view of the fused QKV product.
    lengths_B: number of cached tokens of each sequence, including the new token. 0 means a padding row, whose result is
               zeros and whose block table is not read.
    scale:     factor of q · k; None means C ** -0.5.
    window:    number of last cached tokens to attend to, including the new token; None means all.
    """
    batch, num_heads, head_dim = q_BHC.shape
    page_size = cache_PXE.shape[1]
    group = num_heads // num_kv_heads
    factor = head_dim**-0.5 if scale is None else scale
    out_BHC = q_BHC.new_zeros(batch, num_heads, head_dim)
    for row, length in enumerate(lengths_B.tolist()):
        if length == 0:
            continue
        pages = block_table_BM[row, : -(-length // page_size)].long()
        first = 0 if window is None else max(0, length - window)
        kv_SJKC = cache_PXE[pages].flatten(0, 1)[first:length].unflatten(1, (2, num_kv_heads, head_dim)).float()
        keys_HSC, values_HSC = kv_SJKC.permute(1, 2, 0, 3).repeat_interleave(group, dim=1)
        scores_HS = torch.einsum("hc,hsc->hs", q_BHC[row].float(), keys_HSC) * factor
        out_BHC[row] = torch.einsum("hs,hsc->hc", scores_HS.softmax(dim=-1), values_HSC).to(q_BHC.dtype)
    return out_BHC
