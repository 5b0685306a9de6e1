"""SwiGLU in Triton; see `swiglu`. One program computes a tile of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_kernels.swiglu import Activation
from megatron_kernels.tuning import elementwise_tile


@triton.jit
def _swiglu(gate_up, out, width, stride_in, stride_out, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = gate_up + row * stride_in + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    bent = gate
    if IS_GELU:
        # (1 + tanh(z)) / 2 is the logistic function of 2 z.
        bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    result = gate / (1.0 + tl.exp(-bent)) * up
    tl.store(out + row * stride_out + columns, result.to(out.dtype.element_ty), mask=inside)


def swiglu(
    gate_up_TG: torch.Tensor, *, activation: Activation = "silu", out_TF: torch.Tensor | None = None
) -> torch.Tensor:
    tokens, width = gate_up_TG.shape[0], gate_up_TG.shape[1] // 2
    if out_TF is None:
        out_TF = gate_up_TG.new_empty(tokens, width)
    if tokens:
        tile = elementwise_tile(width)
        _swiglu[(tokens, triton.cdiv(width, tile.block))](
            gate_up_TG,
            out_TF,
            width,
            gate_up_TG.stride(0),
            out_TF.stride(0),
            IS_GELU=activation == "gelu_tanh",
            BLOCK=tile.block,
            num_warps=tile.num_warps,
        )
    return out_TF
