"""Sampling of any mix of requests in one batch.

A token is drawn with one uniform number by inverting the cumulative distribution over the tokens in the order
(probability descending, id ascending). Every row is computed by itself, so that its token does not depend on its batch.

N rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_runtime.sampling.philox import uniform

Float32 = npt.NDArray[np.float32]

_CANDIDATES = (256, 4096)
"""How many of the likeliest tokens are sorted first. Nearly every draw falls among them; otherwise all are sorted."""


def sample(
    logits_NV: Float32,
    *,
    temperature: Float32,
    top_k: npt.NDArray[np.int32],
    top_p: Float32,
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.int32]:
    """Return a token for every row, int32 [N].

    temperature: 0 takes the likeliest token (the lowest id of equals).
    top_k:       0 keeps all tokens.
    top_p:       0 and 1 keep all tokens; applied to what top_k left.
    seeds, positions: fix the random number of the row.
    """
    tokens = logits_NV.argmax(axis=-1).astype(np.int32)
    drawn = np.flatnonzero(temperature > 0)
    for row, number in zip(drawn, uniform(seeds[drawn], positions[drawn]), strict=True):
        scaled_V = logits_NV[row] / temperature[row]
        tokens[row] = _draw(scaled_V, number, top_k=int(top_k[row]), top_p=float(top_p[row]))
    return tokens


def log_probs(logits_NV: Float32, tokens: npt.NDArray[Any]) -> Float32:
    """Return the natural logarithm of the probability of each row's token, float32 [N]."""
    shifted_NV = logits_NV - logits_NV.max(axis=-1, keepdims=True)
    totals_N = np.exp(shifted_NV).sum(axis=-1, dtype=np.float64)
    chosen_N = np.take_along_axis(shifted_NV, tokens[:, None], axis=-1)[:, 0]
    result: Float32 = (chosen_N - np.log(totals_N)).astype(np.float32)
    return result


def _draw(scaled_V: Float32, number: float, *, top_k: int, top_p: float) -> int:
    weights_V = np.exp(scaled_V - scaled_V.max())
    vocabulary = len(weights_V)
    total = float(weights_V.sum(dtype=np.float64))
    for count in (*_CANDIDATES, vocabulary):
        ids_C = _likeliest(scaled_V, max(count, top_k))
        cumulative_C = weights_V[ids_C].cumsum(dtype=np.float64)
        is_all = len(ids_C) == vocabulary
        index = _invert(cumulative_C, number, total=total, top_k=top_k, top_p=top_p, is_all=is_all)
        if index is not None:
            return int(ids_C[index])
    raise AssertionError("unreachable: every draw is decided among all tokens")


def _invert(
    cumulative_C: npt.NDArray[np.float64], number: float, *, total: float, top_k: int, top_p: float, is_all: bool
) -> int | None:
    """Return the index of the drawn candidate, or None when the candidates are too few to tell."""
    kept, mass = len(cumulative_C), total
    if 0 < top_k <= kept:
        kept, mass, is_all = top_k, float(cumulative_C[top_k - 1]), True
    if 0 < top_p < 1:
        reached = int(np.searchsorted(cumulative_C[:kept], top_p * mass))
        if reached < kept:
            kept, mass, is_all = reached + 1, float(cumulative_C[reached]), True
        elif not is_all:
            return None
    index = int(np.searchsorted(cumulative_C[:kept], number * mass, side="right"))
    if index < kept:
        return index
    # Rounding may leave the sum of all a little below `mass`.
    return kept - 1 if is_all else None


def _likeliest(scaled_V: Float32, count: int) -> npt.NDArray[np.int64]:
    """Return the ids of the `count` largest and of all that equal the last, by (value descending, id ascending)."""
    if count < len(scaled_V):
        ids_C = np.flatnonzero(scaled_V >= np.partition(scaled_V, -count)[-count])
    else:
        ids_C = np.arange(len(scaled_V))
    return ids_C[np.argsort(-scaled_V[ids_C], kind="stable")]
