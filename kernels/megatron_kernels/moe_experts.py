"""The experts of a mixture of experts.

They compute the gated feed-forward of each (token, selected expert) pair, and the weighted sum of the results per
token.

Shapes: T tokens, D hidden size, N experts of the model, X of them on this rank, F feed-forward width of an expert, G =
        2 F (gate and up), J selected experts of a token, R positions in the order of `moe_routing`.
Types: float32, bfloat16 or float16, the same for x and weights. Products accumulate in float32. The hidden layer before
       SwiGLU, the hidden layer after SwiGLU, the weighted result of a pair, and the sum are each rounded once.
Bound:  memory at decode; bytes = (U (G D + D F) + 2 T D) s for U selected experts, each of which is read once. With
        many tokens, the bound is compute; FLOPs = 2 P (G D + D F) for P pairs.
Source: one grouped product over tokens sorted by expert, as in MegaBlocks (Gale et al. 2022, arXiv:2211.15841).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_kernels.moe_routing import Routing
from megatron_kernels.swiglu import swiglu


def bytes_moved(tokens: int, experts: int, *, hidden: int, width: int, element_size: int) -> int:
    """Return the number of bytes that a call of moe_experts reads and writes.

    experts: number of experts that one or more tokens selected.
    """
    return (experts * 3 * hidden * width + 2 * tokens * hidden) * element_size


def flops(pairs: int, *, hidden: int, width: int) -> int:
    return 6 * pairs * hidden * width


def moe_experts(
    x_TD: torch.Tensor,
    gate_up_XGD: torch.Tensor,
    down_XDF: torch.Tensor,
    routing: Routing,
    *,
    first: int = 0,
    alignment: int,
) -> torch.Tensor:
    """Return y_TD, the weighted sum of the outputs of each token's selected experts on this rank.

    first:     index of this rank's first expert among the experts of the model.
    alignment: alignment with which `routing` was computed. A tile of the product has this number of positions.
    """
    pairs_TJD = x_TD.new_zeros(*routing.experts_TJ.shape, x_TD.shape[1])
    for number, (gate_up_GD, down_DF) in enumerate(zip(gate_up_XGD, down_XDF, strict=True), first):
        tokens_S, choices_S = (routing.experts_TJ == number).nonzero(as_tuple=True)
        if not len(tokens_S):
            continue
        gate_up_SG = F.linear(x_TD[tokens_S].float(), gate_up_GD.float()).to(x_TD.dtype)
        y_SD = F.linear(swiglu(gate_up_SG).float(), down_DF.float())
        pairs_TJD[tokens_S, choices_S] = (y_SD * routing.weights_TJ[tokens_S, choices_S][:, None]).to(x_TD.dtype)
    return pairs_TJD.sum(dim=1)
