"""Matrix products: see `product`. Products of one row run in Triton for the shapes that a GPU computes faster so, all
others in cuBLAS.

A program computes ROWS outputs: it walks their rows of the matrix and adds up in float32.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from megatron_kernels.tuning import ONE_ROW_PRODUCTS

ROWS, DEPTH = 8, 512
"""Rows of W of a program, and columns of a block."""


@triton.jit
def _one_row_product(x, weight, out, num_rows, num_columns, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    sums = tl.zeros((ROWS, DEPTH), tl.float32)
    starts = weight + row.to(tl.int64)[:, None] * num_columns
    for begin in range(0, num_columns, DEPTH):
        column = begin + tl.arange(0, DEPTH)
        is_column = column < num_columns
        inputs = tl.load(x + column, mask=is_column, other=0.0).to(tl.float32)
        block = tl.load(starts + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0)
        sums += block.to(tl.float32) * inputs[None, :]
    tl.store(out + row, tl.sum(sums, axis=1).to(out.dtype.element_ty), mask=is_row)


def one_row_product(x_1K: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Return y_1N in the type of x_1K. Both must be contiguous."""
    num_rows, num_columns = weight_NK.shape
    out_1N = torch.empty(1, num_rows, dtype=x_1K.dtype, device=x_1K.device)
    _one_row_product[(triton.cdiv(num_rows, ROWS),)](
        x_1K, weight_NK, out_1N, num_rows, num_columns, ROWS=ROWS, DEPTH=DEPTH, num_warps=4, num_stages=3
    )
    return out_1N


def product(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    if len(x_TK) == 1 and (device_name(x_TK.device), *weight_NK.shape) in ONE_ROW_PRODUCTS:
        return one_row_product(x_TK, weight_NK)
    return F.linear(x_TK, weight_NK)


@cache
def device_name(device: torch.device) -> str:
    """Return the name of a device in ONE_ROW_PRODUCTS."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
