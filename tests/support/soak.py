"""Sizes and repetitions of randomised tests: once and small in `make test`, many times and large in `make soak`.

MEGATRON_SOAK=1           full sizes.
MEGATRON_REPETITIONS=N    repetitions of each test.
MEGATRON_SEED=N           the first seed. A test's name contains its seed.
MEGATRON_PART=K/N         run every Nth case of an exhaustive test, from the Kth on: splits one long run into N.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
SOAK = os.environ.get("MEGATRON_SOAK", "0") not in ("", "0")
FIRST_SEED = int(os.environ.get("MEGATRON_SEED", "1"))


def size(test: T, *, soak: T) -> T:
    """Return `test` in `make test` and `soak` in `make soak`."""
    return soak if SOAK else test


def pairwise(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations in `make soak`. In `make test` return some, which contain every pair of two values."""
    cases = [*product(*values)]
    if SOAK:
        return cases
    missing = {pair for case in cases for pair in _pairs(case)}
    chosen = []
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing & _pairs(case))))
        missing -= _pairs(chosen[-1])
    return chosen


def _pairs(case: tuple[Any, ...]) -> set[Any]:
    return set(combinations(enumerate(case), 2))


def part(everything: Sequence[T]) -> list[T]:
    """Return the cases that MEGATRON_PART selects; all without it."""
    which, of = map(int, os.environ.get("MEGATRON_PART", "1/1").split("/"))
    assert 1 <= which <= of, f"MEGATRON_PART={which}/{of}: K/N has K from 1 to N"
    return list(everything[which - 1 :: of])


def repeated(*, soak: int = 20) -> Callable[[Any], Any]:
    """Run a test once, or `soak` times in `make soak`, each time with its own `seed`."""
    count = int(os.environ.get("MEGATRON_REPETITIONS") or size(1, soak=soak))
    seeds = range(FIRST_SEED, FIRST_SEED + count)
    return pytest.mark.parametrize("seed", seeds, ids=lambda seed: f"seed={seed}")
