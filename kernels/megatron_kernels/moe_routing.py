"""Selects the experts of each token with their weights, and sorts the (token, choice) pairs by expert.

Shapes: T tokens, N experts, J selected experts of a token, R = T J (token, choice) pairs.
Types:  logits float32, bfloat16 or float16; weights float32, computed in float32; indices int32.
Bound:  memory; bytes = T N s + 16 T J + 8 N (logits read; weights, experts, order and positions written). At decode,
        the number of launches determines the time.
Source: softmax gating with top-k of Shazeer et al. 2017, arXiv:1701.06538; the order is a stable counting sort.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token, and the (token, expert) pairs grouped by expert.

    weights_TJ, experts_TJ: weights and indices of each token's experts, in descending order of probability. Of equal
        probabilities, the lower index is first.
    counts_N: number of pairs of each expert.
    starts_M:   M = N + 1; the start of each expert's part of `order_R`, and the end of the last part.
    order_R:    pair numbers t * J + j, sorted by expert, then by token. Each part is padded with -1 up to the
                alignment. All elements after starts_M[-1] are -1.
    places_TJ:  index of each pair in `order_R`.
    """

    weights_TJ: torch.Tensor
    experts_TJ: torch.Tensor
    counts_N: torch.Tensor
    starts_M: torch.Tensor
    order_R: torch.Tensor
    places_TJ: torch.Tensor


def bytes_moved(tokens: int, *, num_experts: int, top_k: int, element_size: int) -> int:
    return tokens * num_experts * element_size + 16 * tokens * top_k + 8 * num_experts


def order_size(tokens: int, *, num_experts: int, top_k: int, alignment: int) -> int:
    """Return a size of `order_R` that suffices for any choice of experts, so that the host need not read device
    memory.
    """
    pairs = tokens * top_k
    return pairs + min(num_experts, pairs) * (alignment - 1)


def moe_routing(logits_TN: torch.Tensor, *, top_k: int, normalize: bool = True, alignment: int = 1) -> Routing:
    """Route every token to the `top_k` experts with the highest probabilities.

    normalize: whether to divide the selected probabilities by their sum.
    alignment: number of rows in a tile of a grouped product. Each expert's part of `order_R` is padded to a multiple of
               this number.
    """
    tokens, num_experts = logits_TN.shape
    probabilities_TN = logits_TN.float().softmax(dim=-1)
    sorted_TN, experts_TN = probabilities_TN.sort(dim=-1, descending=True, stable=True)
    weights_TJ, experts_TJ = sorted_TN[:, :top_k], experts_TN[:, :top_k]
    if normalize:
        weights_TJ = weights_TJ / weights_TJ.sum(dim=-1, keepdim=True)
    pairs_R = experts_TJ.flatten()
    counts_N = torch.bincount(pairs_R, minlength=num_experts)
    aligned_N = -(-counts_N // alignment) * alignment
    starts_M = torch.cat((aligned_N.new_zeros(1), aligned_N.cumsum(0)))
    by_expert_R = pairs_R.argsort(stable=True)
    rank_R = torch.arange(len(pairs_R), device=pairs_R.device) - (counts_N.cumsum(0) - counts_N)[pairs_R[by_expert_R]]
    places_R = starts_M[pairs_R[by_expert_R]] + rank_R
    size = order_size(tokens, num_experts=num_experts, top_k=top_k, alignment=alignment)
    order_R = torch.full((size,), -1, dtype=torch.int32, device=logits_TN.device)
    order_R[places_R] = by_expert_R.int()
    places_TJ = torch.empty_like(pairs_R).scatter_(0, by_expert_R, places_R).view(tokens, top_k)
    return Routing(
        weights_TJ=weights_TJ.contiguous(),
        experts_TJ=experts_TJ.int(),
        counts_N=counts_N.int(),
        starts_M=starts_M.int(),
        order_R=order_R,
        places_TJ=places_TJ.int(),
    )
