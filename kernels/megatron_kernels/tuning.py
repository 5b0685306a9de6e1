"""Functions that determine, from shapes only, how kernels are split into programs.

There is no autotuning at run time, so a captured graph and a replayed request always use the same split.

The values follow from the granularity of the hardware (32 lanes per warp, 16-byte loads, tensor-core tiles of 16 rows).
Only SPLIT_TOKENS was compared with other values on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_DOT_ROWS = 16
"""Minimum number of rows of a tensor-core product. Products with fewer rows are padded."""


SPLIT_TOKENS = 128
"""Minimum number of cached tokens per program of decode attention.

The step `attention` of the GPU campaign compares other values.
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch parameters of an element-wise kernel.

    block:     number of elements per program.
    num_warps: number of warps per program.
    """

    block: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Launch parameters of paged_decode.

    block_tokens: number of cached tokens per matrix product.
    splits:       number of programs per sequence.
    split_tokens: minimum number of tokens per program, a multiple of block_tokens.
    """

    block_tokens: int
    splits: int
    split_tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Launch parameters of paged_prefill.

    block_queries: number of new tokens per program.
    block_tokens:  number of cached tokens per matrix product.
    """

    block_queries: int
    block_tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Launch parameters of moe_experts.

    columns: number of result columns per program.
    depth:   number of values of a row per matrix product.
    """

    columns: int
    depth: int
    num_warps: int
    num_stages: int


def next_power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def elementwise_tile(width: int) -> Tile:
    """Return the tile for an element-wise operation on rows of `width` elements, with at most 8 elements per lane."""
    block = min(1024, max(32, next_power_of_2(width)))
    return Tile(block, max(1, min(4, block // 256)))


def row_tile(width: int) -> Tile:
    """Return the tile for an operation that reduces over a row.

    The tile is the whole row, with at most 16 elements per lane and at most 16 warps.
    """
    block = max(32, next_power_of_2(width))
    return Tile(block, max(1, min(16, block // 512)))


def decode_tuning(
    *,
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    max_tokens: int,
    num_sms: int,
    split_tokens: int = SPLIT_TOKENS,
) -> DecodeTuning:
    """Return how decode attention splits its cached tokens into programs.

    The number of splits suffices for two programs per multiprocessor, but is at most 64. Each split has `split_tokens`
    tokens or more.

    max_tokens: the longest context that the launch supports. A CUDA graph has a fixed limit, which can be higher than
                the longest context of the batch.
    """
    block_tokens = 64 if head_dim <= 128 else 32
    wanted = -(-2 * num_sms // max(1, batch * num_kv_heads))
    splits = max(1, min(wanted, -(-max_tokens // split_tokens), 64))
    return DecodeTuning(block_tokens, splits, split_tokens, num_warps=4, num_stages=3 if head_dim <= 128 else 2)


def prefill_tuning(*, group: int, head_dim: int) -> PrefillTuning:
    """Return how prefill attention is split into programs.

    A program has 128 rows, or 64 for large heads. A row is a pair (token, query head of the group).
    """
    rows = 128 if head_dim <= 128 else 64
    block_queries = max(1, rows // next_power_of_2(group))
    return PrefillTuning(block_queries, 64, num_warps=8, num_stages=3 if head_dim <= 64 else 2)


def heads_block(*, tokens: int, num_heads: int, head_dim: int) -> int:
    """Return the number of heads that a program computes for one token.

    With enough tokens to fill the device, the heads of a program have at most 2048 elements in total. With fewer
    tokens, a program computes at most 4 heads.
    """
    maximum = max(1, 2048 // next_power_of_2(head_dim)) if tokens >= 256 else 4
    return min(maximum, next_power_of_2(num_heads))


def routing_rows(tokens: int) -> int | None:
    """Return the number of rows of a single program that computes the whole expert routing.

    Return None if there are too many tokens for a single program.
    """
    return next((rows for rows in (16, 64) if tokens <= rows), None)


def routing_block(num_experts: int) -> int:
    """Return the number of tokens per program of expert routing.

    A program has at most 64 tokens, and at most 4096 (token, expert) elements.
    """
    return max(1, min(64, 4096 // next_power_of_2(num_experts)))


def expert_places(*, tokens: int, top_k: int, num_experts: int) -> int:
    """Return the number of positions in a tile of the experts' products. Each expert's part is aligned to this number.

    The number is the minimum for a tensor-core product, or 64 if an expert gets at least 32 tokens on average.
    """
    return 64 if tokens * top_k >= 32 * num_experts else MIN_DOT_ROWS


def expert_tile(places: int) -> ExpertTile:
    """Return the launch parameters of moe_experts for tiles of `places` rows."""
    if places <= MIN_DOT_ROWS:
        return ExpertTile(columns=64, depth=128, num_warps=4, num_stages=4)
    return ExpertTile(columns=128, depth=64, num_warps=8, num_stages=3)


def vocabulary_tile(vocabulary: int, element_size: int) -> Tile:
    """Return the tile of a loop over a row of logits. It has 32 bytes per lane if the row is long enough.

    With 16 float32 logits per lane, the kernel would spill registers.
    """
    block = min(4096, max(32, next_power_of_2(vocabulary)))
    return Tile(block, max(1, block * element_size // 1024))
