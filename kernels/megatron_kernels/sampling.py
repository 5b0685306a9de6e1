"""Samples one token for every row of logits, with temperature, top-k, min-p, top-p and one counter-based random number.

Shapes: N rows, V vocabulary.
Types:  logits float32, bfloat16 or float16; sums of weights float64; tokens int32; log-probabilities float32.
Bound:  memory; bytes = N V s for one read of the logits, which suffices for greedy rows. Any other row is read again
        for the sum of its weights, for the draw, and for each step of a search with top-k or top-p. These reads hit the
        L2 cache if the row fits.
Meaning: a weight is exp((logit - largest logit) / temperature). top_k keeps the k tokens with the largest weights; of
         equal weights, the lower id is kept first. min_p keeps the tokens whose weight is not less than min_p. top_p
         keeps the smallest set of the most likely remaining tokens whose sum reaches top_p of the total. The sampled
         token is the first, in the order of ids, at which the running sum of kept weights exceeds u times the sum of
         all kept weights. u is the uniform Philox number of (seed, position), so the token is the same in any batch. A
         logit of -inf means the probability 0. If a row contains NaN or inf, or only -inf, its token is NOT_FINITE.
Source: Philox4x32-10 is Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import torch

NOT_FINITE = -1
"""A value in place of the token of a row whose logits are not finite."""
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def bytes_moved(rows: int, vocabulary: int, *, element_size: int) -> int:
    return rows * vocabulary * element_size


def uniform(seed: int, position: int) -> float:
    """Return a uniform random number in (0, 1) for (seed, position), from 52 bits of Philox4x32-10."""
    x0, x1, x2, x3 = position & _LOW, (position >> 32) & _LOW, 0, 0
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (p1 >> 32) ^ x1 ^ k0, p1 & _LOW, (p0 >> 32) ^ x3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return (((x0 << 20) | (x1 >> 12)) + 0.5) * 2.0**-52


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
    """Return the tokens, int32 [N], and their log-probabilities under the unchanged logits, float32 [N].

    The log-probability of the token NOT_FINITE is NaN.

    temperature_N: float32; 0 selects the most likely token. Of equally likely tokens, it selects the lowest id.
    top_k_N:       int32; 0 keeps all tokens.
    top_p_N, min_p_N: float32; a top_p of 0 or 1 and a min_p of 0 keep all tokens.
    seeds_N, positions_N: int64; the 64 bits of an element of seeds_N are the seed.
    processed_NV:  float32; receives the logits from which the tokens are drawn. The largest logit is subtracted, and
                   the difference is divided by the temperature. Removed tokens have -inf. The values of a row with the
                   token NOT_FINITE are undefined. None if the caller does not need these logits.
    """
    best_N, tokens_N = logits_NV.float().max(dim=-1)  # NaN is larger than all numbers
    is_finite_N = best_N.isfinite()
    for row in range(logits_NV.shape[0]):
        temperature = temperature_N[row]
        scaled_V = logits_NV[row].float() - best_N[row]
        if temperature > 0 and is_finite_N[row]:
            scaled_V /= temperature
            weights_V = scaled_V.exp()
            number = uniform(int(seeds_N[row]), int(positions_N[row]))
            ids_K = _kept_ids(weights_V, top_k=int(top_k_N[row]), top_p=float(top_p_N[row]), min_p=float(min_p_N[row]))
            tokens_N[row] = _draw(weights_V, ids_K, number)
            scaled_V = torch.full_like(scaled_V, -torch.inf).index_copy(0, ids_K, scaled_V[ids_K])
        if processed_NV is not None:
            processed_NV[row] = scaled_V
    log_probs_NV = logits_NV.double().log_softmax(dim=-1)
    log_probs_N = log_probs_NV.gather(1, tokens_N[:, None])[:, 0].float()
    return tokens_N.where(is_finite_N, NOT_FINITE).int(), log_probs_N.where(is_finite_N, torch.nan)


def _kept_ids(weights_V: torch.Tensor, *, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return the token ids that the filters keep, in ascending order."""
    sorted_V, ids_V = weights_V.sort(descending=True, stable=True)
    kept = top_k if 0 < top_k < len(weights_V) else len(weights_V)
    kept = min(kept, int((weights_V >= min_p).sum()))
    if 0 < top_p < 1:
        cumulative_K = sorted_V[:kept].double().cumsum(0)
        kept = min(kept, int(torch.searchsorted(cumulative_K, top_p * cumulative_K[-1])) + 1)
    return ids_V[:kept].sort().values


def _draw(weights_V: torch.Tensor, ids_K: torch.Tensor, number: float) -> int:
    cumulative_K = weights_V[ids_K].double().cumsum(0)
    index = int(torch.searchsorted(cumulative_K, number * cumulative_K[-1], right=True))
    return int(ids_K[min(index, len(ids_K) - 1)])
