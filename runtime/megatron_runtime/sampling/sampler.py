"""Sampling of any mix of requests in one batch, and log-probabilities of tokens (natural logarithms).

One uniform random number in (0, 1) selects a token. It is the first token, in the order of ids, at which the cumulative
weight of the kept tokens exceeds the random number times the sum of their weights. Every row is computed independently,
so its token does not depend on the other rows. If a row cannot be sampled, only this row fails (RowFailure). A logit of
-inf means the probability 0. The random number comes from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers:
as easy as 1, 2, 3"). This counter-based generator has no state. The number for a pair (seed, position) is the same in
any batch, on any engine, and after a request was moved or replayed.

Shapes: N rows, V vocabulary, C candidates, K most likely tokens. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_runtime.sampling.batch import (
    NO_LOG_PROBS,
    NO_TOKEN,
    Float32,
    Int32,
    LogitEdits,
    RowFailure,
    SamplingBatch,
)

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

_CANDIDATE_WEIGHTS = (1e-2, 1e-4, 1e-7, 0.0)
"""Thresholds of weights, relative to the most likely token.

Only tokens above the threshold are sorted. If there are too few such tokens to decide, the next threshold is used.
"""
_BLOCK = 256
_ROUNDS = 10  # rounds of Philox; the constants below are Philox's too
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class StepLogits(Protocol):
    """The output of one forward pass, on any device."""

    @property
    def sampled_rows(self) -> Int64:
        """The rows of the plan that need a token, int64 [n]."""

    def sample(self, batch: SamplingBatch, *, reports_raw: bool) -> tuple[Int32, dict[int, LogProbs]]:
        """Return the tokens, int32 [n], and the requested log-probabilities.

        The first value has a token or a RowFailure for each of `sampled_rows`. The second value maps rows of the plan
        to log-probabilities. Rows that fail are not in the map.

        reports_raw: whether to report log-probabilities of the model's own logits instead of the processed logits.
        """

    def prompt_log_probs(self, batch: SamplingBatch) -> Iterator[tuple[int, LogProbs]]:
        """Yield pairs (row of the plan, log-probabilities of the row's next prompt targets), in the order of the
        targets.

        The log-probabilities are computed from the model's unprocessed logits. They are NaN if these logits are not
        finite.
        """

    def hidden_states(self, which: Int64) -> Float32:
        """Return the hidden states, float32 [m, D], from which the tokens of some rows are sampled.

        which: int64 [m]; indices into `sampled_rows`.
        """

    def rows_not_finite(self) -> Int64:
        """Return the rows of the plan, int64 [n], that have several tokens and a hidden state with NaN or infinity.

        The keys and values of all tokens of such a row can be wrong. Therefore, no other request may share them.
        """


@dataclass(frozen=True, slots=True)
class LogProbs:
    """The log-probabilities of the tokens of N rows.

    chosen_N:   float32, log-probability of the chosen token of each row.
    top_ids_NK: int32, the K most likely tokens of each row, by descending probability.
    top_NK:     float32, the log-probabilities of `top_ids_NK`.
    """

    chosen_N: Float32
    top_ids_NK: Int32
    top_NK: Float32

    def row(self, index: int, count: int) -> list[tuple[int, float]]:
        """Return the `count` most likely tokens of a row as pairs (id, log-probability)."""
        ids, values = self.top_ids_NK[index, :count], self.top_NK[index, :count]
        return list(zip(ids.tolist(), values.tolist(), strict=True))


def log_probs(logits_NV: npt.NDArray[np.floating[Any]], tokens_N: npt.NDArray[np.integer], *, top_n: int) -> LogProbs:
    """Return the log-probabilities of `tokens_N`. A row is NaN if its logits contain NaN or inf, or are all -inf.

    top_n: K, the number of most likely tokens to return, at most V. Of equal values, the lower id is first.
    """
    top_n = min(top_n, logits_NV.shape[1])
    best_N = logits_NV.max(axis=-1)
    if not np.isfinite(best_N).all():
        logits_NV = np.where(np.isfinite(best_N)[:, None], logits_NV, np.float32(0.0))
        result = log_probs(logits_NV, tokens_N, top_n=top_n)
        result.chosen_N[~np.isfinite(best_N)] = result.top_NK[~np.isfinite(best_N)] = np.nan
        return result
    shifted_NV = logits_NV - best_N[:, None]
    norms_N = np.log(np.exp(shifted_NV).sum(axis=-1, dtype=np.float64))
    chosen_N = np.take_along_axis(shifted_NV, tokens_N[:, None].astype(np.int64), axis=-1)[:, 0] - norms_N
    top_ids_NK = np.stack([_likeliest(row_V, top_n) for row_V in shifted_NV])
    top_NK = np.take_along_axis(shifted_NV, top_ids_NK.astype(np.int64), axis=-1) - norms_N[:, None]
    return LogProbs(chosen_N.astype(np.float32), top_ids_NK, top_NK.astype(np.float32))


def _likeliest(values_V: npt.NDArray[np.floating[Any]], count: int) -> Int32:
    if count == 0:
        return np.empty(0, dtype=np.int32)
    minimum = np.partition(values_V, -count)[-count]
    ids_C = np.flatnonzero(values_V >= minimum)
    return ids_C[np.argsort(-values_V[ids_C], kind="stable")][:count].astype(np.int32)


@np.errstate(over="ignore", invalid="ignore")
def sample_step(
    step: StepLogits, batch: SamplingBatch, *, reports_raw: bool
) -> tuple[Int32, dict[int, LogProbs], dict[int, LogProbs], dict[int, Float32]]:
    """Sample the tokens of one step.

    Returns four values, each indexed by row of the plan:

    - int32 tokens. A row that needs no token has NO_TOKEN, and a row that fails has a RowFailure.
    - The requested log-probabilities of sampled tokens.
    - The requested log-probabilities of prompt tokens.
    - The requested hidden states, float32 [D].

    reports_raw: as in StepLogits.sample().
    """
    tokens = np.full(len(batch.temperature), NO_TOKEN, dtype=np.int32)
    reported: dict[int, LogProbs] = {}
    if len(step.sampled_rows):
        tokens[step.sampled_rows], reported = step.sample(batch, reports_raw=reports_raw)
    of_prompts: dict[int, list[LogProbs]] = {}
    for row, lines in step.prompt_log_probs(batch):
        if np.isnan(lines.chosen_N).any():
            tokens[row] = RowFailure.MODEL
        of_prompts.setdefault(row, []).append(lines)
    which = np.flatnonzero(batch.returns_hidden[step.sampled_rows])
    hidden: dict[int, Float32] = {}
    if len(which):
        hidden = dict(zip(step.sampled_rows[which].tolist(), step.hidden_states(which), strict=True))
        for row, state_D in hidden.items():
            if not np.isfinite(state_D).all():
                tokens[row] = RowFailure.MODEL
    tokens[step.rows_not_finite()] = RowFailure.MODEL
    return tokens, reported, {row: _joined(parts) for row, parts in of_prompts.items()}, hidden


def _joined(parts: list[LogProbs]) -> LogProbs:
    return LogProbs(
        np.concatenate([part.chosen_N for part in parts]),
        np.concatenate([part.top_ids_NK for part in parts]),
        np.concatenate([part.top_NK for part in parts]),
    )


def sample_rows(
    logits_NV: Float32, rows: Int64, batch: SamplingBatch, *, reports_raw: bool
) -> tuple[Int32, dict[int, LogProbs]]:
    """Sample the tokens of `rows` on the host. The result is as in StepLogits.sample(). Overwrites `logits_NV`."""
    wanted = np.flatnonzero(batch.num_log_probs[rows] != NO_LOG_PROBS).tolist()
    # sample() changes logits in place.
    reported = {index: logits_NV[index].copy() for index in wanted}
    tokens = sample(logits_NV, batch, rows)
    lines = {}
    for index, logits_V in reported.items():
        row = int(rows[index])
        if tokens[index] < 0:
            continue
        reported_V = logits_V if reports_raw else processed_logits(logits_V, batch, row)
        lines[row] = log_probs(reported_V[None], tokens[index : index + 1], top_n=int(batch.num_log_probs[row]))
    return tokens, lines


def processed_logits(logits_V: Float32, batch: SamplingBatch, row: int) -> npt.NDArray[np.floating[Any]]:
    """Return the logits from which the token of `row` is sampled.

    These logits are divided by the temperature, and are -inf for removed tokens.
    """
    edits, temperature = batch.edits.get(row), float(batch.temperature[row])
    if edits is not None:
        apply_edits(logits_V, edits)
    if temperature == 0:
        return logits_V
    ids_C = _kept_ids_of(batch, row, _weights(logits_V, temperature))
    # Divide in float64, because the quotient of a large logit and a low temperature exceeds float32.
    scaled_V = np.divide(logits_V, temperature, dtype=np.float64)
    if ids_C is None:
        return scaled_V
    kept_V = np.full_like(scaled_V, -np.inf)
    kept_V[ids_C] = scaled_V[ids_C]
    return kept_V


def sample(logits_NV: Float32, batch: SamplingBatch, rows: Int64) -> Int32:
    """Sample a token for every row. Return int32 [N], a token or a RowFailure per row.

    Overwrites the logits of the rows that have edits.

    rows: int64 [N]; the row of `batch` for each row of logits.
    """
    edited: dict[int, LogitEdits] = {}
    for index, row in enumerate(rows.tolist()) if batch.edits else ():
        edits = batch.edits.get(row)
        if edits is None:
            continue
        if np.isfinite(logits_NV[index].max()):
            apply_edits(logits_NV[index], edits)
            edited[index] = edits
        else:  # check before a mask hides a NaN or inf
            logits_NV[index] = np.nan
    temperature = batch.temperature[rows]
    tokens = logits_NV.argmax(axis=-1).astype(np.int32)
    # The largest logit is NaN if any logit is NaN, otherwise inf if any is inf. It is -inf if no token has any
    # probability.
    best_N = logits_NV[np.arange(len(tokens)), tokens]
    for index in np.flatnonzero(~np.isfinite(best_N)).tolist():
        tokens[index] = _cause(float(best_N[index]), edited.get(index))
    drawn = np.flatnonzero((temperature > 0) & (tokens >= 0))
    numbers = uniform(batch.seeds[rows[drawn]], batch.positions[rows[drawn]])
    for index, number in zip(drawn.tolist(), numbers.tolist(), strict=True):
        row = rows[index]
        weights_V = _weights(logits_NV[index], float(temperature[index]))
        tokens[index] = _invert(weights_V, _kept_ids_of(batch, int(row), weights_V), float(number))
    return tokens


def _cause(best: float, edits: LogitEdits | None) -> RowFailure:
    """Return the cause of failure of a row whose largest logit, `best`, is not finite.

    edits: edits of the row if it has any and the model's own logits were finite; otherwise None.
    """
    if edits is None:
        return RowFailure.MODEL
    return RowFailure.MASK if best == -np.inf and edits.allowed is not None else RowFailure.EDITS


def apply_edits(logits_V: Float32, edits: LogitEdits) -> None:
    """Apply the penalties, biases and masks of one row in place."""
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
        before_M = logits_V[edits.banned]
        logits_V[edits.banned] = -np.inf
        if np.isneginf(logits_V.max()):  # only banned tokens are left
            logits_V[edits.banned] = before_M


def _weights(logits_V: Float32, temperature: float) -> Float32:
    """Return the probabilities of the tokens, divided by the largest probability. The largest logit must be finite."""
    scaled_V = logits_V - logits_V.max()
    scaled_V /= np.float32(temperature)
    return np.exp(scaled_V, out=scaled_V)


def _kept_ids_of(batch: SamplingBatch, row: int, weights_V: Float32) -> Int64 | None:
    return kept_ids(
        weights_V, top_k=int(batch.top_k[row]), top_p=float(batch.top_p[row]), min_p=float(batch.min_p[row])
    )


def kept_ids(weights_V: Float32, *, top_k: int, top_p: float, min_p: float) -> Int64 | None:
    """Return the token ids that pass the filters top-k, min-p and top-p, in ascending order.

    Return None if all pass.
    """
    if top_k == 0 and not 0 < top_p < 1:
        return np.flatnonzero(weights_V >= min_p) if min_p > 0 else None
    total = float((weights_V[weights_V >= min_p] if min_p > 0 else weights_V).sum(dtype=np.float64))
    for minimum in _CANDIDATE_WEIGHTS:
        ids_C = np.flatnonzero(weights_V >= max(minimum, min_p))
        ids_C = ids_C[np.argsort(-weights_V[ids_C], kind="stable")]
        kept = _kept_count(weights_V[ids_C], total=total, top_k=top_k, top_p=top_p, is_all=minimum <= min_p)
        if kept is not None:
            return np.sort(ids_C[:kept])
    raise AssertionError("unreachable: every filter is decided among all tokens")


def _kept_count(weights_C: Float32, *, total: float, top_k: int, top_p: float, is_all: bool) -> int | None:
    """Return how many of the most likely tokens pass top-k and then top-p.

    Return None if more candidates are needed to decide.
    """
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


def _invert(weights_V: Float32, ids_C: Int64 | None, number: float) -> int:
    if ids_C is not None:
        return int(ids_C[_first_beyond(weights_V[ids_C].cumsum(dtype=np.float64), number)])
    # Select a block first, then a token in it. This is faster than a cumulative sum over the whole vocabulary.
    starts = _block_starts(len(weights_V))
    cumulative_B = np.add.reduceat(weights_V, starts).cumsum(dtype=np.float64)
    block = _first_beyond(cumulative_B, number)
    before = float(cumulative_B[block - 1]) if block else 0.0
    start = int(starts[block])
    cumulative_C = weights_V[start : start + _BLOCK].cumsum(dtype=np.float64)
    rest = (number * float(cumulative_B[-1]) - before) / float(cumulative_C[-1])
    return start + _first_beyond(cumulative_C, rest)


def _first_beyond(cumulative_C: npt.NDArray[np.float64], number: float) -> int:
    """Return the first index at which the cumulative sum exceeds `number` (0 to 1) times the total."""
    total = cumulative_C[-1]
    return int(np.searchsorted(cumulative_C, min(number * total, np.nextafter(total, 0.0)), side="right"))


@cache
def _block_starts(vocabulary: int) -> Int64:
    return np.arange(0, vocabulary, _BLOCK)


def philox4x32(counters: UInt64, keys: UInt64) -> UInt64:
    """Return 4 random words of 32 bits for every counter, each word in a uint64.

    counters: uint64 [4, n], four words of 32 bits each.
    keys:     uint64 [2, n], two words of 32 bits each.
    """
    x0, x1, x2, x3 = counters
    k0, k1 = keys
    for _ in range(_ROUNDS):
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (product1 >> _HALF) ^ x1 ^ k0, product1 & _LOW, (product0 >> _HALF) ^ x3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((x0, x1, x2, x3))


def uniform(seeds: UInt64, positions: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return a uniform number in the open interval (0, 1) for every pair (seed, position).

    seeds:     uint64 [n].
    positions: integers >= 0, [n].
    """
    counters = np.zeros((4, len(seeds)), dtype=np.uint64)
    positions = positions.astype(np.uint64)
    counters[0], counters[1] = positions & _LOW, positions >> _HALF
    words = philox4x32(counters, np.stack((seeds & _LOW, seeds >> _HALF)))
    # Use 52 bits plus one half. With one more bit, the largest number would be rounded up to 1.
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52
