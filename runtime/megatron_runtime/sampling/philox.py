"""Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), over arrays.

A counter-based generator has no state: the number for (seed, position) is the same in any batch, on any engine, and
after a request was moved or replayed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

UInt64 = npt.NDArray[np.uint64]


def philox4x32(counters: UInt64, keys: UInt64) -> UInt64:
    """Return 4 random words of 32 bits, each in a uint64, for every counter.

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
    """Return one number of (0, 1), both ends excluded, for every (seed, position).

    seeds:     uint64 [n].
    positions: integers >= 0, [n].
    """
    counters = np.zeros((4, len(seeds)), dtype=np.uint64)
    positions = positions.astype(np.uint64)
    counters[0], counters[1] = positions & _LOW, positions >> _HALF
    words = philox4x32(counters, np.stack((seeds & _LOW, seeds >> _HALF)))
    # 52 bits and a half: one bit more would round the largest number up to 1.
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52
