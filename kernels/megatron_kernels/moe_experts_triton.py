"""The experts of a mixture of experts in Triton; see `moe_experts`. SwiGLU runs between two grouped products.

A position is an index of `Routing.order_R`. In each product, a program multiplies a tile of one expert's positions by a
tile of columns of the expert's matrix. The program finds its expert on the device by bisection. The number of programs
does not depend on the selected experts, so that CUDA graphs can capture the launches. No two programs add to the same
sum. The first product has one result row per position, and the second product has one per (token, expert) pair. The
pairs of a token are summed in the order of the token's choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_kernels.attention_tile_triton import WIDEN_PRODUCTS
from megatron_kernels.moe_routing import Routing
from megatron_kernels.swiglu_triton import swiglu
from megatron_kernels.tuning import expert_tile


@triton.jit
def _find_expert(starts, place, num_experts):
    """Return the index of the expert whose part of Routing.order_R contains the index `place`.

    This is the last expert whose part begins at `place` or earlier, because experts without tokens have empty parts.
    """
    low, high = 0, num_experts
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) <= place:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["first_expert"])
def _expert_product(
    x,
    matrices,
    order,
    starts,
    weights,
    out,
    first_expert,
    num_held,
    num_experts,
    columns,
    depth,
    stride_x,
    TOP_K: tl.constexpr,
    TO_PAIRS: tl.constexpr,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Multiply tiles of x by the matrices of their experts.

    By default, the rows of x are tokens, and the rows of out are positions in `order`. With TO_PAIRS, the rows of x are
    positions, and the rows of out are pairs. The results of pairs are multiplied by the pairs' weights.
    """
    start = tl.program_id(0) * PLACES
    if start >= tl.load(starts + num_experts):
        return
    expert = _find_expert(starts, start, num_experts) - first_expert
    if (expert < 0) | (expert >= num_held):
        return
    places = start + tl.arange(0, PLACES)
    pairs = tl.load(order + places)
    inside = pairs >= 0
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = column < columns
    rows = (places if TO_PAIRS else pairs // TOP_K).to(tl.int64)
    x_at = x + rows[:, None] * stride_x
    matrix_at = matrices + (expert.to(tl.int64) * columns + column)[None, :] * depth
    sums = tl.zeros((PLACES, COLUMNS), tl.float32)
    for begin in range(0, depth, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        k_inside = k < depth
        left = tl.load(x_at + k[None, :], mask=inside[:, None] & k_inside[None, :], other=0.0)
        right = tl.load(matrix_at + k[:, None], mask=k_inside[:, None] & column_inside[None, :], other=0.0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        sums += tl.dot(left, right, input_precision="ieee")
    if TO_PAIRS:
        sums *= tl.load(weights + pairs, mask=inside, other=0.0)[:, None]
    out_rows = (pairs if TO_PAIRS else places).to(tl.int64)
    out_at = out + out_rows[:, None] * columns + column[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=inside[:, None] & column_inside[None, :])


def moe_experts(
    x_TD: torch.Tensor,
    gate_up_XGD: torch.Tensor,
    down_XDF: torch.Tensor,
    routing: Routing,
    *,
    first: int = 0,
    alignment: int,
) -> torch.Tensor:
    """Implement `moe_experts.moe_experts`."""
    if not (gate_up_XGD.is_contiguous() and down_XDF.is_contiguous()):
        raise ValueError("the experts' matrices must be contiguous: stack them")
    if alignment < 16 or alignment & (alignment - 1):
        raise ValueError(f"alignment={alignment}: must be a power of 2 from 16 on, a tile of the product")
    (tokens, top_k), hidden = routing.experts_TJ.shape, x_TD.shape[1]
    places = len(routing.order_R) // alignment * alignment
    # No program writes the pairs of other ranks' experts, so they must be zero before the launch.
    is_whole = len(gate_up_XGD) == len(routing.counts_N)
    pairs_PD = (x_TD.new_empty if is_whole else x_TD.new_zeros)(tokens * top_k, hidden)
    if tokens:
        gate_up_RG = x_TD.new_empty(places, gate_up_XGD.shape[1])
        _product(x_TD, gate_up_XGD, routing, gate_up_RG, first=first, places=alignment, to_pairs=False)
        # The positions of other ranks' experts are not initialised. Results that are computed from them are not read.
        _product(swiglu(gate_up_RG), down_XDF, routing, pairs_PD, first=first, places=alignment, to_pairs=True)
    return pairs_PD.view(tokens, top_k, hidden).sum(dim=1)


def _product(
    x: torch.Tensor,
    matrices: torch.Tensor,
    routing: Routing,
    out: torch.Tensor,
    *,
    first: int,
    places: int,
    to_pairs: bool,
) -> None:
    num_held, columns, depth = matrices.shape
    tile = expert_tile(places)
    _expert_product[(len(routing.order_R) // places, triton.cdiv(columns, tile.columns))](
        x,
        matrices,
        routing.order_R,
        routing.starts_M,
        routing.weights_TJ,
        out,
        first,
        num_held,
        len(routing.counts_N),
        columns,
        depth,
        x.stride(0),
        TOP_K=routing.experts_TJ.shape[1],
        TO_PAIRS=to_pairs,
        PLACES=places,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        WIDEN=WIDEN_PRODUCTS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
