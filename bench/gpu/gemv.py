"""y = W·x for one row of x, in Triton: a yardstick for cuBLAS at one row, not tuned."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, DEPTH = 8, 512
"""Rows of W of a program, and columns of a block."""


@triton.jit
def _gemv(x_ptr, weight_ptr, out_ptr, num_rows, num_columns, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    sums = tl.zeros((ROWS, DEPTH), tl.float32)
    starts = weight_ptr + row.to(tl.int64)[:, None] * num_columns
    for begin in range(0, num_columns, DEPTH):
        column = begin + tl.arange(0, DEPTH)
        is_column = column < num_columns
        x = tl.load(x_ptr + column, mask=is_column, other=0.0).to(tl.float32)
        block = tl.load(starts + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        sums += block.to(tl.float32) * x[None, :]
    tl.store(out_ptr + row, tl.sum(sums, axis=1).to(out_ptr.dtype.element_ty), mask=is_row)


def gemv(x_1K: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Return y_1N in the type of x_1K, with sums in float32."""
    num_rows, num_columns = weight_NK.shape
    out_1N = torch.empty(1, num_rows, dtype=x_1K.dtype, device=x_1K.device)
    grid = (triton.cdiv(num_rows, ROWS),)
    _gemv[grid](x_1K, weight_NK, out_1N, num_rows, num_columns, ROWS=ROWS, DEPTH=DEPTH, num_warps=4, num_stages=3)
    return out_1N
