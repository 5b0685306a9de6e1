"""Residual addition and RMSNorm in Triton; see `add_rms_norm`. One program computes one row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_kernels.tuning import row_tile


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    hidden,
    epsilon,
    stride_x,
    stride_residual,
    stride_out,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    place = residual + row * stride_residual + columns
    total = tl.load(place, mask=inside, other=0.0)
    if ADDS:
        added = tl.load(x + row * stride_x + columns, mask=inside, other=0.0)
        total = (total.to(tl.float32) + added.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(place, total, mask=inside)
    exact = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, axis=0) / hidden + epsilon)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = (exact * scale * factors).to(out.dtype.element_ty)
    tl.store(out + row * stride_out + columns, result, mask=inside)


def add_rms_norm(
    x_TD: torch.Tensor | None, residual_TD: torch.Tensor, weight_D: torch.Tensor, *, epsilon: float
) -> torch.Tensor:
    tokens, hidden = residual_TD.shape
    out_TD = residual_TD.new_empty(tokens, hidden)
    if tokens:
        tile = row_tile(hidden)
        adds = x_TD is not None
        source_TD = residual_TD if x_TD is None else x_TD
        _add_rms_norm[(tokens,)](
            source_TD,
            residual_TD,
            weight_D,
            out_TD,
            hidden,
            epsilon,
            source_TD.stride(0),
            residual_TD.stride(0),
            out_TD.stride(0),
            ADDS=adds,
            BLOCK=tile.block,
            num_warps=tile.num_warps,
        )
    return out_TD
