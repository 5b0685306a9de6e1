"""Expert routing in Triton; see `moe_routing`.

The sizes of the launches depend only on shapes. The kernels use no atomic operations, and the host reads no device
memory. So the order is deterministic, and CUDA graphs can capture the launches.

Up to 64 tokens take one launch of one program. More tokens take three launches:

1. One program per block of tokens computes the probabilities, the selected experts, and the number of choices of each
   expert.
2. One program sums over blocks and experts. The sums are the start of each expert's part, and the start of each
   block's pairs in the part.
3. One program per block of tokens computes the position of each pair. A token selects an expert at most once. So the
   rank of a pair is the number of earlier tokens in the block that selected the same expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_kernels.moe_routing import Routing, order_size
from megatron_kernels.tuning import next_power_of_2, routing_block, routing_rows


@triton.jit
def _choose_experts(
    logits,
    weights,
    experts,
    rows,
    tokens,
    num_experts,
    stride_logits,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Write the experts that `rows` select, and the weights of these experts.

    Returns the experts [ROWS, CHOICES], and a matrix [ROWS, EXPERTS] with 1 for each selected expert, otherwise 0.
    """
    columns, choices = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    row_inside = rows < tokens
    inside = row_inside[:, None] & (columns < num_experts)[None, :]
    source = logits + rows.to(tl.int64)[:, None] * stride_logits + columns[None, :]
    scores = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32)
    # A row outside of the tensor has no finite score, so its maximum is replaced to avoid NaN.
    largest = tl.where(row_inside, tl.max(scores, axis=1), 0.0)
    exponentials = tl.exp(scores - largest[:, None])
    remaining = tl.where(inside, exponentials, -1.0)
    chosen_weights = tl.zeros((ROWS, CHOICES), tl.float32)
    chosen_experts = tl.zeros((ROWS, CHOICES), tl.int32)
    has_chosen = tl.zeros((ROWS, EXPERTS), tl.int32)
    for choice in tl.static_range(TOP_K):
        expert = tl.argmax(remaining, axis=1).to(tl.int32)
        is_expert = columns[None, :] == expert[:, None]
        weight = tl.sum(tl.where(is_expert, exponentials, 0.0), axis=1)
        is_choice = choices[None, :] == choice
        chosen_weights = tl.where(is_choice, weight[:, None], chosen_weights)
        chosen_experts = tl.where(is_choice, expert[:, None], chosen_experts)
        has_chosen += (is_expert & row_inside[:, None]).to(tl.int32)
        remaining = tl.where(is_expert, -1.0, remaining)
    divisor = tl.sum(chosen_weights, axis=1) if NORMALIZE else tl.sum(exponentials, axis=1)
    chosen_weights = chosen_weights / tl.where(row_inside, divisor, 1.0)[:, None]
    pairs = rows[:, None] * TOP_K + choices[None, :]
    pairs_inside = row_inside[:, None] & (choices < TOP_K)[None, :]
    tl.store(weights + pairs, chosen_weights, mask=pairs_inside)
    tl.store(experts + pairs, chosen_experts, mask=pairs_inside)
    return chosen_experts, has_chosen


@triton.jit(do_not_specialize=["tokens", "size"])
def _route(
    logits,
    weights,
    experts,
    counts,
    starts,
    order,
    places,
    tokens,
    num_experts,
    alignment,
    size,
    stride_logits,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the whole routing in one program. Used for few tokens."""
    for first in range(0, size, BLOCK):
        index = first + tl.arange(0, BLOCK)
        tl.store(order + index, tl.full((BLOCK,), -1, tl.int32), mask=index < size)
    # Wait until all threads have read these values, because the positions overwrite them.
    tl.debug_barrier()
    rows = tl.arange(0, ROWS)
    chosen_experts, has_chosen = _choose_experts(
        logits,
        weights,
        experts,
        rows,
        tokens,
        num_experts,
        stride_logits,
        TOP_K,
        NORMALIZE,
        ROWS,
        EXPERTS,
        CHOICES,
    )
    columns, choices = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    inside = columns < num_experts
    total = tl.sum(has_chosen, axis=0)
    aligned = (total + alignment - 1) // alignment * alignment
    ends = tl.cumsum(aligned, axis=0)
    tl.store(counts + columns, total, mask=inside)
    tl.store(starts + columns + 1, ends, mask=inside)
    tl.store(starts, 0)
    place_of = (ends - aligned)[None, :] + tl.cumsum(has_chosen, axis=0) - has_chosen
    for choice in tl.static_range(TOP_K):
        expert = tl.sum(tl.where(choices[None, :] == choice, chosen_experts, 0), axis=1)
        place = tl.sum(tl.where(columns[None, :] == expert[:, None], place_of, 0), axis=1)
        pairs = rows * TOP_K + choice
        tl.store(places + pairs, place, mask=rows < tokens)
        tl.store(order + place, pairs, mask=rows < tokens)


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    logits,
    weights,
    experts,
    block_counts,
    tokens,
    num_experts,
    stride_logits,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    block = tl.program_id(0)
    _experts, has_chosen = _choose_experts(
        logits,
        weights,
        experts,
        block * ROWS + tl.arange(0, ROWS),
        tokens,
        num_experts,
        stride_logits,
        TOP_K,
        NORMALIZE,
        ROWS,
        EXPERTS,
        CHOICES,
    )
    columns = tl.arange(0, EXPERTS)
    counts = tl.sum(has_chosen, axis=0)
    tl.store(block_counts + block * num_experts + columns, counts, mask=columns < num_experts)


@triton.jit(do_not_specialize=["num_blocks"])
def _sum_blocks(block_counts, counts, starts, num_blocks, num_experts, alignment, EXPERTS: tl.constexpr):
    """Write the number of pairs of each expert to `counts`, and the index at which its part begins to `starts`.

    Before the call, `block_counts` contains the number of pairs of each expert in each block. Replace this number by
    the index in `order` at which these pairs begin.
    """
    columns = tl.arange(0, EXPERTS)
    inside = columns < num_experts
    total = tl.zeros((EXPERTS,), tl.int32)
    for block in range(num_blocks):
        total += tl.load(block_counts + block * num_experts + columns, mask=inside, other=0)
    aligned = (total + alignment - 1) // alignment * alignment
    ends = tl.cumsum(aligned, axis=0)
    tl.store(counts + columns, total, mask=inside)
    tl.store(starts + columns + 1, ends, mask=inside)
    tl.store(starts, 0)
    place = ends - aligned
    for block in range(num_blocks):
        at = block_counts + block * num_experts + columns
        of_block = tl.load(at, mask=inside, other=0)
        tl.store(at, place, mask=inside)
        place += of_block


@triton.jit(do_not_specialize=["tokens"])
def _place(
    experts,
    block_places,
    order,
    places,
    tokens,
    num_experts,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    block = tl.program_id(0)
    rows = block * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, EXPERTS)
    row_inside = rows < tokens
    has_chosen = tl.zeros((ROWS, EXPERTS), tl.int32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(experts + rows * TOP_K + choice, mask=row_inside, other=-1)
        has_chosen += (columns[None, :] == expert[:, None]).to(tl.int32)
    first = tl.load(block_places + block * num_experts + columns, mask=columns < num_experts, other=0)
    place_of = first[None, :] + tl.cumsum(has_chosen, axis=0) - has_chosen
    for choice in tl.static_range(TOP_K):
        pairs = rows * TOP_K + choice
        expert = tl.load(experts + pairs, mask=row_inside, other=-1)
        place = tl.sum(tl.where(columns[None, :] == expert[:, None], place_of, 0), axis=1)
        tl.store(places + pairs, place, mask=row_inside)
        tl.store(order + place, pairs, mask=row_inside)


def moe_routing(logits_TN: torch.Tensor, *, top_k: int, normalize: bool = True, alignment: int = 1) -> Routing:
    """Implement `moe_routing.moe_routing`."""
    tokens, num_experts = logits_TN.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k}: must be from 1 to the {num_experts} experts")
    size = order_size(tokens, num_experts=num_experts, top_k=top_k, alignment=alignment)
    weights_TJ = torch.empty(tokens, top_k, dtype=torch.float32, device=logits_TN.device)
    experts_TJ = torch.empty_like(weights_TJ, dtype=torch.int32)
    places_TJ = torch.empty_like(experts_TJ)
    counts_N, starts_M = experts_TJ.new_empty(num_experts), experts_TJ.new_empty(num_experts + 1)
    order_R = experts_TJ.new_empty(size)
    routing = Routing(weights_TJ, experts_TJ, counts_N, starts_M, order_R, places_TJ)
    padded = next_power_of_2(num_experts)
    options = {"TOP_K": top_k, "NORMALIZE": normalize, "EXPERTS": padded, "CHOICES": next_power_of_2(top_k)}
    rows = routing_rows(tokens)
    if rows is not None:
        _route[(1,)](
            logits_TN,
            weights_TJ,
            experts_TJ,
            counts_N,
            starts_M,
            order_R,
            places_TJ,
            tokens,
            num_experts,
            alignment,
            size,
            logits_TN.stride(0),
            ROWS=rows,
            BLOCK=1024,
            num_warps=rows // 4,
            **options,
        )
        return routing
    if alignment > 1:
        order_R.fill_(-1)
    rows = routing_block(num_experts)
    blocks = triton.cdiv(tokens, rows)
    block_counts = experts_TJ.new_empty(blocks, num_experts)
    _choose[(blocks,)](
        logits_TN,
        weights_TJ,
        experts_TJ,
        block_counts,
        tokens,
        num_experts,
        logits_TN.stride(0),
        ROWS=rows,
        num_warps=4,
        **options,
    )
    _sum_blocks[(1,)](
        block_counts,
        counts_N,
        starts_M,
        blocks,
        num_experts,
        alignment,
        EXPERTS=padded,
        num_warps=max(1, padded // 128),
    )
    _place[(blocks,)](
        experts_TJ,
        block_counts,
        order_R,
        places_TJ,
        tokens,
        num_experts,
        TOP_K=top_k,
        ROWS=rows,
        EXPERTS=padded,
        num_warps=4,
    )
    return routing
