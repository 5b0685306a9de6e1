"""Sampling of any mix of requests in one batch.

A token is drawn with one uniform number: it is the first, in the order of ids, at which the cumulative weight of the
tokens that the filters keep exceeds this share of their sum. Every row is computed by itself, so that its token does
not depend on its batch.

N rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from megatron_runtime.sampling.batch import Float32, LogitEdits, SamplingBatch
from megatron_runtime.sampling.philox import uniform

_CANDIDATE_WEIGHTS = (1e-2, 1e-4, 1e-7, 0.0)
"""Only tokens at least this likely, compared with the likeliest, are sorted; where they do not decide, the next."""


_BLOCK = 256


def sample(logits_NV: Float32, batch: SamplingBatch, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return a token for every row, int32 [N]. The logits of rows with edits are changed in place.

    rows: int64 [N]; the row of `batch` that each row of logits belongs to.
    """
    if batch.edits:
        for index, row in enumerate(rows):
            edits = batch.edits.get(int(row))
            if edits is not None:
                apply_edits(logits_NV[index], edits)
    temperature = batch.temperature[rows]
    tokens = logits_NV.argmax(axis=-1).astype(np.int32)
    drawn = np.flatnonzero(temperature > 0)
    numbers = uniform(batch.seeds[rows[drawn]], batch.positions[rows[drawn]])
    for index, number in zip(drawn.tolist(), numbers.tolist(), strict=True):
        row = rows[index]
        weights_V = _weights(logits_NV[index], float(temperature[index]))
        ids_C = kept_ids(
            weights_V, top_k=int(batch.top_k[row]), top_p=float(batch.top_p[row]), min_p=float(batch.min_p[row])
        )
        tokens[index] = _invert(weights_V, ids_C, float(number))
    return tokens


def apply_edits(logits_V: Float32, edits: LogitEdits) -> None:
    """Penalise, bias and mask one row in place."""
    penalties = edits.penalties
    if penalties is not None:
        seen_M = logits_V[penalties.ids]
        if penalties.repetition != 1:
            seen_M = np.where(seen_M > 0, seen_M / penalties.repetition, seen_M * penalties.repetition)
        seen_M = seen_M - penalties.frequency * penalties.counts - penalties.presence * (penalties.counts > 0)
        logits_V[penalties.ids] = seen_M
    if edits.bias_ids is not None and edits.bias is not None:
        logits_V[edits.bias_ids] += edits.bias
    if edits.allowed is not None:
        is_allowed = np.unpackbits(edits.allowed.view(np.uint8), count=len(logits_V), bitorder="little")
        logits_V[is_allowed == 0] = -np.inf
    if edits.banned is not None:
        held_back = logits_V[edits.banned]
        logits_V[edits.banned] = -np.inf
        if np.isneginf(logits_V.max()):
            logits_V[edits.banned] = held_back


def filtered_logits(logits_V: Float32, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Float32:
    """Return the logits that a token is drawn from: divided by the temperature, -inf where a filter took the token."""
    if temperature == 0:
        return logits_V
    ids_C = kept_ids(_weights(logits_V, temperature), top_k=top_k, top_p=top_p, min_p=min_p)
    scaled_V = logits_V / np.float32(temperature)
    if ids_C is None:
        return scaled_V
    kept_V = np.full_like(scaled_V, -np.inf)
    kept_V[ids_C] = scaled_V[ids_C]
    return kept_V


def _weights(logits_V: Float32, temperature: float) -> Float32:
    """Return probabilities up to a factor; the largest is 1."""
    scaled_V = logits_V - logits_V.max()
    scaled_V /= np.float32(temperature)
    return np.exp(scaled_V, out=scaled_V)


def kept_ids(weights_V: Float32, *, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.int64] | None:
    """Return the ids that top-k and min-p keep, and of these top-p, ascending; None for all."""
    if top_k == 0 and not 0 < top_p < 1:
        return np.flatnonzero(weights_V >= min_p) if min_p > 0 else None
    total = float((weights_V[weights_V >= min_p] if min_p > 0 else weights_V).sum(dtype=np.float64))
    for least in _CANDIDATE_WEIGHTS:
        ids_C = np.flatnonzero(weights_V >= max(least, min_p))
        ids_C = ids_C[np.argsort(-weights_V[ids_C], kind="stable")]
        kept = _kept_count(weights_V[ids_C], total=total, top_k=top_k, top_p=top_p, is_all=least <= min_p)
        if kept is not None:
            return np.sort(ids_C[:kept])
    raise AssertionError("unreachable: every filter is decided among all tokens")


def _kept_count(weights_C: Float32, *, total: float, top_k: int, top_p: float, is_all: bool) -> int | None:
    """Return how many of the likeliest tokens top-k, then top-p keep; None when the candidates are too few to tell."""
    kept, mass = len(weights_C), total
    cumulative_C = weights_C.cumsum(dtype=np.float64)
    if 0 < top_k <= kept:
        kept, mass, is_all = top_k, float(cumulative_C[top_k - 1]), True
    elif top_k > 0 and not is_all:
        return None
    if not 0 < top_p < 1:
        return kept if is_all else None
    reached = int(np.searchsorted(cumulative_C[:kept], top_p * mass))
    if reached == kept and not is_all:
        return None
    return min(reached + 1, kept)


def _invert(weights_V: Float32, ids_C: npt.NDArray[np.int64] | None, number: float) -> int:
    if ids_C is not None:
        return int(ids_C[_first_beyond(weights_V[ids_C].cumsum(dtype=np.float64), number)])
    # First the block, then the token in it: cheaper than adding up the whole vocabulary one by one.
    starts = _block_starts(len(weights_V))
    cumulative_B = np.add.reduceat(weights_V, starts).cumsum(dtype=np.float64)
    block = _first_beyond(cumulative_B, number)
    before = float(cumulative_B[block - 1]) if block else 0.0
    start = int(starts[block])
    cumulative_C = weights_V[start : start + _BLOCK].cumsum(dtype=np.float64)
    rest = (number * float(cumulative_B[-1]) - before) / float(cumulative_C[-1])
    return start + _first_beyond(cumulative_C, rest)


def _first_beyond(cumulative_C: npt.NDArray[np.float64], number: float) -> int:
    """Return the first index where the sum exceeds the share `number` of all, which is 0 to 1 up to rounding."""
    total = cumulative_C[-1]
    return int(np.searchsorted(cumulative_C, min(number * total, np.nextafter(total, 0.0)), side="right"))


@cache
def _block_starts(vocabulary: int) -> npt.NDArray[np.int64]:
    return np.arange(0, vocabulary, _BLOCK)
