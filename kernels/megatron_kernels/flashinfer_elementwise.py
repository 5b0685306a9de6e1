"""SwiGLU and add+RMSNorm by FlashInfer (Ye et al. 2025, arXiv:2501.01005)."""

from __future__ import annotations

import torch
from flashinfer.activation import gelu_tanh_and_mul, silu_and_mul
from flashinfer.norm import fused_add_rmsnorm, rmsnorm

from megatron_kernels.swiglu import Activation


def swiglu(
    gate_up_TG: torch.Tensor, *, activation: Activation = "silu", out_TF: torch.Tensor | None = None
) -> torch.Tensor:
    """As `swiglu.swiglu`."""
    result_TF: torch.Tensor = (silu_and_mul if activation == "silu" else gelu_tanh_and_mul)(gate_up_TG, out=out_TF)
    return result_TF


def add_rms_norm(
    x_TD: torch.Tensor | None, residual_TD: torch.Tensor, weight_D: torch.Tensor, *, epsilon: float
) -> torch.Tensor:
    """As `add_rms_norm.add_rms_norm`; the result overwrites `x_TD`."""
    if x_TD is None:
        result_TD: torch.Tensor = rmsnorm(residual_TD, weight_D, eps=epsilon)
        return result_TD
    fused_add_rmsnorm(x_TD, residual_TD, weight_D, eps=epsilon)
    return x_TD
