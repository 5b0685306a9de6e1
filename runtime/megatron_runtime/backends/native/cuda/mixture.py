"""A mixture of experts on a device: routing and the experts' products, in launches that do not depend on the routing.

A tokens of all expert ranks' steps, D hidden, N experts of the model, X of them here, F feed-forward of an expert as
this rank holds it, G = 2 F.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_kernels.registry import Kernels
from megatron_kernels.tuning import expert_places
from megatron_runtime.backends.native.cuda.linears import StackedLinear
from megatron_runtime.models.config import MoEConfig
from megatron_runtime.models.layers.linear import Linear
from megatron_runtime.models.mixture import ExpertWeights


class DeviceMixture:
    """What this rank's experts add to y_AD. The matrices of `weights` were made by DeviceLinears."""

    def __init__(self, weights: ExpertWeights, device: torch.device) -> None:
        self._router_ND = weights.router_XD.dense().to(device)
        self._gate_up_XGD = _stack([expert.gate_up_FD for expert in weights.experts])
        self._down_XDF = _stack([expert.down_DF for expert in weights.experts])
        self._first = weights.first

    def __call__(self, x_AD: torch.Tensor, moe: MoEConfig, kernels: Kernels) -> torch.Tensor:
        places = expert_places(tokens=len(x_AD), top_k=moe.experts_per_token, num_experts=moe.num_experts)
        routing = kernels.moe_routing(
            F.linear(x_AD, self._router_ND), top_k=moe.experts_per_token, normalize=moe.normalize, alignment=places
        )
        return kernels.moe_experts(
            x_AD, self._gate_up_XGD, self._down_XDF, routing, first=self._first, alignment=places
        )


def _stack(linears: list[Linear]) -> torch.Tensor:
    first = linears[0]
    assert isinstance(first, StackedLinear), "made by DeviceLinears.several"
    return first.stack_XNK
