"""Residual addition and RMSNorm in one pass (Zhang and Sennrich 2019, arXiv:1910.07467).

Shapes: T tokens, D hidden size.
Types:  float32, bfloat16, float16. The sum is rounded to the residual's type. The norm is computed from the rounded sum
        in float32 and rounded once. So the result is equal to the result of the two separate operations.
Bound:  memory. With an addition, bytes = (4 T D + D) s (x and residual read, residual and y written, weight read).
        Without an addition, bytes = (2 T D + D) s. s is the size of an element in bytes.
"""

from __future__ import annotations

import torch


def bytes_moved(tokens: int, hidden: int, *, element_size: int, adds: bool = True) -> int:
    return ((4 if adds else 2) * tokens + 1) * hidden * element_size


def add_rms_norm(
    x_TD: torch.Tensor | None, residual_TD: torch.Tensor, weight_D: torch.Tensor, *, epsilon: float
) -> torch.Tensor:
    """Add `x_TD` to `residual_TD` in place, and return RMSNorm of the sum with the weights `weight_D`, [T, D].

    x_TD: None for the first norm of a model, before which nothing is added. The contents of x_TD are undefined after
          the call, because the result can overwrite them.
    """
    if x_TD is not None:
        residual_TD.add_(x_TD)
    sum_TD = residual_TD.float()
    scale_T1 = torch.rsqrt(sum_TD.square().mean(dim=-1, keepdim=True) + epsilon)
    return (sum_TD * scale_T1 * weight_D.float()).to(residual_TD.dtype)
