"""A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538), without capacity limits: no token is dropped.

T tokens, D hidden, X experts of the model, K experts of a token, S tokens of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_runtime.models.config import MoEConfig
from megatron_runtime.models.layers.linear import Linear

if TYPE_CHECKING:
    from megatron_runtime.models.decoder import FeedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """router_XD: of all experts. experts: those that this rank holds, from number `first` on."""

    router_XD: Linear
    experts: tuple[FeedForward, ...]
    first: int = 0


def route(logits_TX: torch.Tensor, moe: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Which experts a token goes to: (share_TK, float32, and expert_TK)."""
    share_TK, expert_TK = logits_TX.float().softmax(dim=-1).topk(moe.experts_per_token, dim=-1)
    if moe.normalize:
        share_TK = share_TK / share_TK.sum(dim=-1, keepdim=True)
    return share_TK, expert_TK


def mix(
    x_TD: torch.Tensor,
    weights: ExpertWeights,
    moe: MoEConfig,
    feed_forward: Callable[[FeedForward, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What this rank's experts add to y_TD: each computes the tokens that were routed to it, in one product."""
    share_TK, expert_TK = route(weights.router_XD(x_TD), moe)
    # Choices in the order of their experts, so that the tokens of one expert lie together.
    order = expert_TK.flatten().argsort(stable=True)
    counts = expert_TK.flatten().bincount(minlength=moe.num_experts).tolist()
    tokens, shares = order // moe.experts_per_token, share_TK.flatten()[order].to(x_TD.dtype)
    y_TD = torch.zeros_like(x_TD)
    start = sum(counts[: weights.first])
    for number, expert in enumerate(weights.experts, weights.first):
        stop = start + counts[number]
        if stop > start:
            tokens_S = tokens[start:stop]
            y_SD = feed_forward(expert, x_TD.index_select(0, tokens_S))
            y_TD.index_add_(0, tokens_S, y_SD * shares[start:stop, None])
        start = stop
    return y_TD
