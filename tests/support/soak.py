"""How often and how large the survival tests run: once and short in `make test`, many times in `make soak`.

MEGATRON_SOAK=1           full sizes.
MEGATRON_REPETITIONS=N    repetitions of each test, whatever its own number.
MEGATRON_SEED=N           the first seed; a test's seed is in its name.
MEGATRON_PART=K/N         of what a soak tries one by one, every Nth only, from the Kth on: N shorter runs for one long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
SOAK = os.environ.get("MEGATRON_SOAK", "0") not in ("", "0")
FIRST_SEED = int(os.environ.get("MEGATRON_SEED", "1"))


def size(test: int, *, soak: int) -> int:
    """A number that is `test` in `make test` and `soak` in `make soak`."""
    return soak if SOAK else test


def part(everything: Sequence[T]) -> list[T]:
    """What MEGATRON_PART leaves of it; without it, everything."""
    which, of = map(int, os.environ.get("MEGATRON_PART", "1/1").split("/"))
    assert 1 <= which <= of, f"MEGATRON_PART={which}/{of}: K/N has K from 1 to N"
    return list(everything[which - 1 :: of])


def repeated(*, soak: int = 20) -> Callable[[Any], Any]:
    """Run a test once, or `soak` times in `make soak`, each time with its own `seed`."""
    count = int(os.environ.get("MEGATRON_REPETITIONS") or size(1, soak=soak))
    seeds = range(FIRST_SEED, FIRST_SEED + count)
    return pytest.mark.parametrize("seed", seeds, ids=lambda seed: f"seed={seed}")
