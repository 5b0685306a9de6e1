"""Log-probabilities of tokens, and of the likeliest ones beside them. Natural logarithms. No torch.

N rows, V vocabulary, K likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_runtime.sampling.batch import Float32, Int32


@dataclass(frozen=True, slots=True)
class LogProbs:
    """chosen_N: float32, of each row's token. top_ids_NK, top_NK: int32 and float32, the likeliest, descending."""

    chosen_N: Float32
    top_ids_NK: Int32
    top_NK: Float32

    def row(self, index: int, count: int) -> list[tuple[int, float]]:
        """The `count` likeliest tokens of a row, as (id, log-probability)."""
        ids, values = self.top_ids_NK[index, :count], self.top_NK[index, :count]
        return list(zip(ids.tolist(), values.tolist(), strict=True))


def log_probs(logits_NV: Float32, tokens_N: npt.NDArray[np.integer], *, top_n: int) -> LogProbs:
    """Log-probabilities of `tokens_N`. top_n: K, at most V. Of equal values the lower id comes first."""
    vocabulary = logits_NV.shape[1]
    top_n = min(top_n, vocabulary)
    shifted_NV = logits_NV - logits_NV.max(axis=-1, keepdims=True)
    norms_N = np.log(np.exp(shifted_NV).sum(axis=-1, dtype=np.float64))
    chosen_N = np.take_along_axis(shifted_NV, tokens_N[:, None].astype(np.int64), axis=-1)[:, 0] - norms_N
    top_ids_NK = np.stack([_likeliest(row_V, top_n) for row_V in shifted_NV])
    top_NK = np.take_along_axis(shifted_NV, top_ids_NK.astype(np.int64), axis=-1) - norms_N[:, None]
    return LogProbs(chosen_N.astype(np.float32), top_ids_NK, top_NK.astype(np.float32))


def joined(parts: Sequence[LogProbs]) -> LogProbs:
    """The rows of all parts, which have the same K."""
    return LogProbs(
        np.concatenate([part.chosen_N for part in parts]),
        np.concatenate([part.top_ids_NK for part in parts]),
        np.concatenate([part.top_NK for part in parts]),
    )


def _likeliest(values_V: Float32, count: int) -> Int32:
    if count == 0:
        return np.empty(0, dtype=np.int32)
    least = np.partition(values_V, -count)[-count]
    ids_C = np.flatnonzero(values_V >= least)
    return ids_C[np.argsort(-values_V[ids_C], kind="stable")][:count].astype(np.int32)
