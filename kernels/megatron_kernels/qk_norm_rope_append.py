"""Normalises and rotates queries and keys, and appends keys and values to the paged KV cache.

Shapes: T tokens, H query heads, K key-value heads, C size of a head, F = C / 2 rotary pairs, Q = (H + 2 K) C (queries,
        keys, values), P pages, X tokens of a page, E = 2 K C (keys, then values).
Types: float32, bfloat16 or float16, the same for qkv and cache; cos and sin of any float type; slots int64. Queries and
       keys are computed in float32 and rounded once. Values are copied unchanged.
Bound:  memory; without norm weights, bytes = (2 T Q + 4 T F) s (qkv read, queries and cache written, cos and sin read).
Source: RMSNorm of queries and keys as in Qwen3, or over all heads as in OLMo 2 (arXiv:2501.00656). The rotary embedding
        is from Su et al. 2021, arXiv:2104.09864; pair i consists of elements i and i + F.
"""

from __future__ import annotations

import torch


def bytes_moved(tokens: int, *, num_heads: int, num_kv_heads: int, head_dim: int, element_size: int) -> int:
    return 2 * tokens * ((num_heads + 2 * num_kv_heads) * head_dim + head_dim) * element_size


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
    """Overwrite the queries in `qkv_TQ`, and write keys and values to the cache. The keys in `qkv_TQ` do not change.

    cos_TF, sin_TF: cosine and sine of the tokens' angles. Rows can be strided, so views of a wider table are accepted.
    slots_T: cache row of each token, page * X + offset. A token with a negative row is padding and is not written.
    q_norm_C, k_norm_C: weights of RMSNorm over each head; both or neither. With mean_squares_T2, their shapes are [H C]
                        and [K C], for RMSNorm over all heads.
    mean_squares_T2:    float32, contiguous: mean squares of each token's queries and keys, over all heads of the model.
                        None for RMSNorm over each head.
    """
    heads_TNC = qkv_TQ.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    q_THC, k_TKC, v_TKC = heads_TNC.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q_means_T, k_means_T = (None, None) if mean_squares_T2 is None else mean_squares_T2.unbind(1)
    rotated_k_TKC = _rotate(_norm(k_TKC.float(), k_norm_C, k_means_T, epsilon), cos_TF, sin_TF).to(qkv_TQ.dtype)
    q_THC.copy_(_rotate(_norm(q_THC.float(), q_norm_C, q_means_T, epsilon), cos_TF, sin_TF))
    kv_TE = torch.cat((rotated_k_TKC, v_TKC), dim=1).flatten(1)
    is_kept_T = slots_T >= 0
    cache_PXE.view(-1, cache_PXE.shape[2])[slots_T[is_kept_T]] = kv_TE[is_kept_T]


def _norm(
    x_TNC: torch.Tensor, weight_C: torch.Tensor | None, means_T: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    if weight_C is None:
        return x_TNC
    means = x_TNC.square().mean(dim=-1, keepdim=True) if means_T is None else means_T[:, None, None]
    return x_TNC * torch.rsqrt(means + epsilon) * weight_C.float().view(-1, x_TNC.shape[2])


def _rotate(x_TNC: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    cos_T1F, sin_T1F = cos_TF.float()[:, None], sin_TF.float()[:, None]
    first_TNF, second_TNF = x_TNC.chunk(2, dim=-1)
    return torch.cat((first_TNF * cos_T1F - second_TNF * sin_T1F, second_TNF * cos_T1F + first_TNF * sin_T1F), dim=-1)
