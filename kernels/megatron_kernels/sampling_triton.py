"""Sampling in Triton without sorting; see `sampling`. One program computes one row.

Bisection over the bits of weights finds the smallest weight that a filter keeps. The bits of non-negative floats, read
as integers, have the same order as the floats. So a search has at most 30 steps. Each step narrows the range to weights
that occur in the row, until only one weight is left. If a filter keeps only some of several equal weights, it keeps the
lowest ids. Sums are float64 and added in a fixed order, so that the token of a row depends only on the row.

A search reads its weights many times. Before the first search, the weights of likely tokens are copied to a buffer. If
the buffer is large enough and these weights suffice to decide, the search reads only the buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_kernels.sampling import NOT_FINITE
from megatron_kernels.tuning import vocabulary_tile

CANDIDATES = 4096
"""Capacity of a row's buffer, in weights."""

_BITS_OF_ONE = tl.constexpr(0x3F800000)
_CANDIDATE_BITS = tl.constexpr(0x38800000)
"""Bits of 2^-14, the minimum weight of tokens in the buffer. top-k and top-p rarely keep a token with a smaller
weight.
"""
_STEP = tl.constexpr(2.0**-52)
_NOT_FINITE = tl.constexpr(NOT_FINITE)


@triton.jit
def _bits(row, columns, vocabulary, largest, temperature):
    """Return the bits of the weights of `columns`; 0 for columns outside the row."""
    logits = tl.load(row + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.exp(tl.div_rn(logits - largest, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def _total(bits, reaches):
    return tl.sum(tl.where(reaches, bits.to(tl.float32, bitcast=True), 0.0).to(tl.float64), axis=0)


@triton.jit
def _sum_from(row, vocabulary, largest, temperature, threshold, BLOCK: tl.constexpr):
    """Return the sum of the token weights whose bits are at least `threshold`."""
    mass = tl.full((), 0.0, tl.float64)
    for first in range(0, vocabulary, BLOCK):
        bits = _bits(row, first + tl.arange(0, BLOCK), vocabulary, largest, temperature)
        mass += _total(bits, bits >= threshold)
    return mass


@triton.jit
def _gather(row, buffer, vocabulary, largest, temperature, BLOCK: tl.constexpr, CAPACITY: tl.constexpr):
    """Copy the bits of the large token weights to the buffer, up to its capacity.

    A weight is large if its bits are at least _CANDIDATE_BITS. Return the number and the sum of all large weights,
    even if the buffer is too small for them.
    """
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    for first in range(0, vocabulary, BLOCK):
        bits = _bits(row, first + tl.arange(0, BLOCK), vocabulary, largest, temperature)
        is_likely = bits >= _CANDIDATE_BITS
        likely = tl.sum(is_likely.to(tl.int32), axis=0)
        if likely > 0:
            places = count + tl.cumsum(is_likely.to(tl.int32), axis=0) - 1
            tl.store(buffer + places, bits, mask=is_likely & (places < CAPACITY))
            mass += _total(bits, is_likely)
        count += likely
    # Wait for all threads, because each reads what others have written to the buffer.
    tl.debug_barrier()
    return count, mass


@triton.jit
def _measure(row, buffer, vocabulary, num_buffered, largest, temperature, threshold, BLOCK: tl.constexpr):
    """Return four values about the selected weights, which are the weights whose bits are not less than `threshold`.

    The values are the number of selected weights, their sum, the smallest bits among them, and the largest bits of all
    other weights. The number is valid for thresholds above 0, because columns outside the row have weight 0. Reads the
    buffer, or the row if `num_buffered` is 0.
    """
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    smallest = tl.full((), _BITS_OF_ONE, tl.int32)
    greatest = tl.full((), 0, tl.int32)
    size = tl.where(num_buffered > 0, num_buffered, vocabulary)
    for first in range(0, size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        if num_buffered > 0:
            bits = tl.load(buffer + columns, mask=columns < num_buffered, other=0)
        else:
            bits = _bits(row, columns, vocabulary, largest, temperature)
        reaches = bits >= threshold
        count += tl.sum(reaches.to(tl.int32), axis=0)
        mass += _total(bits, reaches)
        smallest = tl.minimum(smallest, tl.min(tl.where(reaches, bits, _BITS_OF_ONE), axis=0))
        greatest = tl.maximum(greatest, tl.max(tl.where(reaches, 0, bits), axis=0))
    return count, mass, smallest, greatest


@triton.jit
def _search(
    row,
    buffer,
    vocabulary,
    num_buffered,
    largest,
    temperature,
    low,
    target,
    BY_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the greatest threshold, not less than `low`, for which the weights at or above it reach `target`.

    A weight's bits are compared with the threshold. Also returns the number and the sum of the weights above the
    threshold. BY_COUNT: whether `target` is a number of weights and not a sum. All weights at or above `low` together
    must reach the target.
    """
    high = tl.full((), _BITS_OF_ONE + 1, tl.int32)
    count_above = tl.full((), 0, tl.int32)
    mass_above = tl.full((), 0.0, tl.float64)
    while high - low > 1:
        middle = low + (high - low) // 2
        count, mass, smallest, greatest = _measure(
            row, buffer, vocabulary, num_buffered, largest, temperature, middle, BLOCK
        )
        if BY_COUNT:
            reaches = count >= target
        else:
            reaches = mass >= target
        if reaches:
            low = smallest
        else:
            high = tl.maximum(greatest, low) + 1
            count_above = count
            mass_above = mass
    return low, count_above, mass_above


@triton.jit
def _keep(
    row,
    buffer,
    vocabulary,
    largest,
    temperature,
    top_k,
    top_p,
    min_p,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Apply all filters, and return (cut, ties, mass).

    The filters keep all weights whose bits exceed `cut`, and the first `ties` weights whose bits are equal to `cut`.
    `mass` is the sum of all kept weights.
    """
    cut = tl.full((), 0, tl.int32)
    ties = vocabulary
    mass = tl.full((), 0.0, tl.float64)
    num_likely = tl.full((), 0, tl.int32)
    likely_mass = tl.full((), 0.0, tl.float64)
    limits_number = (top_k > 0) & (top_k < vocabulary)
    limits_mass = (top_p > 0.0) & (top_p < 1.0)
    if limits_number | limits_mass:
        num_likely, likely_mass = _gather(row, buffer, vocabulary, largest, temperature, BLOCK, CAPACITY)
    fits = num_likely <= CAPACITY
    if limits_number:
        num_buffered = tl.where(fits & (num_likely >= top_k), num_likely, 0)
        cut, count_above, mass_above = _search(
            row, buffer, vocabulary, num_buffered, largest, temperature, cut, top_k, True, BLOCK
        )
        ties = top_k - count_above
        mass = mass_above + ties.to(tl.float64) * cut.to(tl.float32, bitcast=True).to(tl.float64)
    bits_of_min_p = min_p.to(tl.int32, bitcast=True)
    if bits_of_min_p > cut:
        cut = bits_of_min_p
        ties = vocabulary
        limits_number = False
    if not limits_number:
        mass = _sum_from(row, vocabulary, largest, temperature, cut, BLOCK)
    if limits_mass:
        target = top_p.to(tl.float64) * mass
        num_buffered = tl.where(fits & (likely_mass >= target), num_likely, 0)
        last_kept, _count, mass_above = _search(
            row, buffer, vocabulary, num_buffered, largest, temperature, cut, target, False, BLOCK
        )
        weight = last_kept.to(tl.float32, bitcast=True).to(tl.float64)
        needed = tl.ceil((target - mass_above) / tl.where(weight > 0.0, weight, 1.0))
        if last_kept > cut:
            ties = vocabulary
        # Keep one or more, and at most all, of the equal weights, because rounding can result in one too many.
        ties = tl.minimum(ties, tl.maximum(needed, 1.0).to(tl.int32))
        whole = _sum_from(row, vocabulary, largest, temperature, last_kept, BLOCK)
        mass = tl.minimum(whole, mass_above + ties.to(tl.float64) * weight)
        cut = last_kept
    return cut, ties, mass


@triton.jit
def _draw(row, vocabulary, largest, temperature, cut, ties, target, BLOCK: tl.constexpr):
    """Return the first token, in the order of ids, at which the running sum of kept weights exceeds `target`.

    Return the last kept token if the sum of all kept weights does not exceed `target`.
    """
    token = tl.full((), -1, tl.int32)
    last = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    ties_before = tl.full((), 0, tl.int32)
    running = tl.full((), 0.0, tl.float64)
    while (token < 0) & (first < vocabulary):
        columns = first + tl.arange(0, BLOCK)
        bits = _bits(row, columns, vocabulary, largest, temperature)
        inside = columns < vocabulary
        is_tie = (bits == cut) & inside
        ties_so_far = ties_before + tl.cumsum(is_tie.to(tl.int32), axis=0)
        kept = ((bits > cut) & inside) | (is_tie & (ties_so_far <= ties))
        kept_weights = tl.where(kept, bits.to(tl.float32, bitcast=True), 0.0).to(tl.float64)
        mass = tl.sum(kept_weights, axis=0)
        if running + mass > target:
            beyond = (running + tl.cumsum(kept_weights, axis=0) > target) & kept
            candidate = tl.min(tl.where(beyond, columns, vocabulary), axis=0)
            token = tl.where(candidate < vocabulary, candidate, -1)
        last = tl.maximum(last, tl.max(tl.where(kept, columns, 0), axis=0))
        running += mass
        ties_before += tl.sum(is_tie.to(tl.int32), axis=0)
        first += BLOCK
    return tl.where(token < 0, last, token)


@triton.jit
def _process(row, processed, vocabulary, largest, temperature, cut, ties, BLOCK: tl.constexpr):
    """Write the scaled logits of the kept tokens, and -inf for all other tokens."""
    ties_before = tl.full((), 0, tl.int32)
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        logits = tl.load(row + columns, mask=inside, other=float("-inf")).to(tl.float32)
        scaled = tl.div_rn(logits - largest, temperature)
        bits = tl.exp(scaled).to(tl.int32, bitcast=True)
        is_tie = (bits == cut) & inside
        ties_so_far = ties_before + tl.cumsum(is_tie.to(tl.int32), axis=0)
        kept = (bits > cut) | (is_tie & (ties_so_far <= ties))
        tl.store(processed + columns, tl.where(kept, scaled, float("-inf")), mask=inside)
        ties_before += tl.sum(is_tie.to(tl.int32), axis=0)


@triton.jit
def _uniform(seed, position):
    zero = tl.full((), 0, tl.uint32)
    word0, word1, _word2, _word3 = tl.philox(
        seed.to(tl.uint64, bitcast=True), position.to(tl.uint32), (position >> 32).to(tl.uint32), zero, zero
    )
    bits = (word0.to(tl.uint64) << 20) | (word1.to(tl.uint64) >> 12)
    return (bits.to(tl.float64) + 0.5) * _STEP


@triton.jit(
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions"],
)
def _sample(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    tokens,
    log_probs,
    buffers,
    processed,
    vocabulary,
    stride_logits,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride_logits
    token = tl.full((), 0, tl.int32)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, vocabulary, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(row + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(values, axis=0))
        if new_largest > largest:
            token = first + tl.argmax(values, axis=0).to(tl.int32)
            total *= tl.exp(largest - new_largest).to(tl.float64)
            largest = new_largest
        shift = tl.where(largest > float("-inf"), largest, 0.0)
        total += tl.sum(tl.exp(values - shift).to(tl.float64), axis=0)
    # If the row has NaN or inf, the sum is NaN. If all logits are -inf, the sum is 0. Comparisons with NaN are false.
    is_finite = (total > 0.0) & (total < float("inf"))
    temperature = tl.load(temperatures + index)
    # Greedy rows keep all tokens.
    cut, ties = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    if (temperature > 0.0) & is_finite:
        top_k, top_p, min_p = tl.load(top_ks + index), tl.load(top_ps + index), tl.load(min_ps + index)
        buffer = buffers + index.to(tl.int64) * CAPACITY
        cut, ties, mass = _keep(row, buffer, vocabulary, largest, temperature, top_k, top_p, min_p, BLOCK, CAPACITY)
        number = _uniform(tl.load(seeds + index), tl.load(positions + index))
        token = _draw(row, vocabulary, largest, temperature, cut, ties, number * mass, BLOCK)
    if PROCESSED:
        divisor = tl.where(temperature > 0.0, temperature, 1.0)
        _process(row, processed + index.to(tl.int64) * vocabulary, vocabulary, largest, divisor, cut, ties, BLOCK)
    # If the row has NaN, `token` can be any index of a tile, so read column 0 instead.
    chosen = tl.load(row + tl.where(is_finite, token, 0)).to(tl.float32)
    log_prob = chosen - largest - tl.log(total.to(tl.float32))
    tl.store(tokens + index, tl.where(is_finite, token, _NOT_FINITE))
    tl.store(log_probs + index, tl.where(is_finite, log_prob, float("nan")))


def sample(
    logits_NV: torch.Tensor,
    *,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    seeds_N: torch.Tensor,
    positions_N: torch.Tensor,
    processed_NV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement `sampling.sample`. processed_NV must be contiguous."""
    rows, vocabulary = logits_NV.shape
    tokens_N = torch.empty(rows, dtype=torch.int32, device=logits_NV.device)
    log_probs_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    if rows:
        tile = vocabulary_tile(vocabulary, logits_NV.element_size())
        _sample[(rows,)](
            logits_NV,
            temperature_N,
            top_k_N,
            top_p_N,
            min_p_N,
            seeds_N,
            positions_N,
            tokens_N,
            log_probs_N,
            tokens_N.new_empty(rows, CANDIDATES),
            log_probs_N if processed_NV is None else processed_NV,
            vocabulary,
            logits_NV.stride(0),
            BLOCK=tile.block,
            CAPACITY=CANDIDATES,
            PROCESSED=processed_NV is not None,
            num_warps=tile.num_warps,
        )
    return tokens_N, log_probs_N
