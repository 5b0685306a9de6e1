"""The signatures of the operations. Each operation is documented in the file with its name."""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_kernels.moe_routing import Routing
from megatron_kernels.swiglu import Activation


class AddRmsNorm(Protocol):
    def __call__(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, weight_D: torch.Tensor, *, epsilon: float
    ) -> torch.Tensor: ...


class SwiGlu(Protocol):
    def __call__(
        self, gate_up_TG: torch.Tensor, *, activation: Activation = "silu", out_TF: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class QkNormRopeAppend(Protocol):
    def __call__(
        self,
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
    ) -> None: ...


class PagedDecode(Protocol):
    def __call__(
        self,
        q_BHC: torch.Tensor,
        cache_PXE: torch.Tensor,
        block_table_BM: torch.Tensor,
        lengths_B: torch.Tensor,
        *,
        num_kv_heads: int,
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor: ...


class PagedPrefill(Protocol):
    def __call__(
        self,
        q_THC: torch.Tensor,
        cache_PXE: torch.Tensor,
        block_table_BM: torch.Tensor,
        lengths_B: torch.Tensor,
        query_starts_B: torch.Tensor,
        *,
        num_kv_heads: int,
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor: ...


class Sample(Protocol):
    def __call__(
        self,
        logits_NV: torch.Tensor,
        *,
        temperature_N: torch.Tensor,
        top_k_N: torch.Tensor,
        top_p_N: torch.Tensor,
        min_p_N: torch.Tensor,
        seeds_N: torch.Tensor,
        positions_N: torch.Tensor,
        processed_NV: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class MoeRouting(Protocol):
    def __call__(
        self, logits_TN: torch.Tensor, *, top_k: int, normalize: bool = True, alignment: int = 1
    ) -> Routing: ...


class MoeExperts(Protocol):
    def __call__(
        self,
        x_TD: torch.Tensor,
        gate_up_XGD: torch.Tensor,
        down_XDF: torch.Tensor,
        routing: Routing,
        *,
        first: int = 0,
        alignment: int,
    ) -> torch.Tensor: ...
