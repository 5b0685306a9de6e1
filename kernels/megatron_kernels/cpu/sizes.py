"""Sizes shared by compiled code and its callers. No numba, which the callers do not need."""

from __future__ import annotations

from megatron_kernels.cpu.records import BFLOAT16, FLOAT32, INT4

BLOCK = 32
"""Inputs of a block of an integer format."""
INT4_BLOCK_BYTES = 160
INT8_BLOCK_BYTES = 272
"""Of eight outputs."""
UNIT = 16
"""Outputs of a unit of a matrix: one panel of floats, two of integers."""
MOST_ROWS = 6
"""Of a float tile: 6 x 2 accumulators, 2 weights and one activation fill 15 of 16 registers."""
MOST_INT4_ROWS = 4
"""Of an int4 tile: 8 registers hold a block of weights."""
MOST_INT8_ROWS = 3
"""Of an int8 tile: each row has two sums; those of four do not fit the registers, and gave 43 instead of 56 billion
products a second."""
SQUARE_BYTES = UNIT * BLOCK * 4
"""Floats of 32 inputs of a unit, on their way to a panel."""
SEMAPHORE_BYTES = 64
"""sem_t has 32 bytes on 64-bit Linux; each has a cache line of its own."""
_ROW_BYTES = 1 << 18
"""Bytes of activations that stay in the L2 cache while all panels of a work item use them."""


def block_rows(form: int, inputs: int) -> int:
    """Rows that stay in the cache while panels use them: a multiple of both tiles' rows."""
    size = inputs * 4 if form in (FLOAT32, BFLOAT16) else inputs
    return max(24, _ROW_BYTES // size // 24 * 24)


def least_scratch(context: int, *, group: int, head_dim: int, inputs: int, has_prompts: bool) -> int:
    """Return the floats of scratch memory that each thread needs for a step.

    context: tokens of the longest sequence, a multiple of 16. group: query heads that share a key-value head.
    inputs: of the gated product.
    """
    gated = 2 * UNIT * block_rows(INT4, inputs)
    scores = (max(group, MOST_ROWS) + 1) * context
    gathered = 2 * context * head_dim if has_prompts else 0
    return max(gated, scores + gathered)
