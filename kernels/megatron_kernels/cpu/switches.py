"""Optimisations of the CPU engine that can be switched off, so that a benchmark can measure each.

Each is an environment variable, read when an engine is created: "0" switches it off, "1" or unset leaves it on. Answers
do not depend on it unless its description states it. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum


class InvalidSwitchError(ValueError):
    """A switch is neither 0 nor 1. The message names the variable, its value and the remedy."""


class Switch(StrEnum):
    """The environment variables."""

    NATIVE = "MEGATRON_NATIVE"
    """Packed matrices and compiled steps; off: the decoder in torch, where int8 and int4 do not run. Answers in float32
    differ only between equally likely tokens, those in bfloat16 by rounding."""
    PARALLEL_LOAD = "MEGATRON_PARALLEL_LOAD"
    """All threads read and pack weights; off: one thread."""
    LARGE_PAGES = "MEGATRON_LARGE_PAGES"
    """After loading, packed weights are moved into pages of 2 MiB; off: they stay in pages of 4 KiB."""
    CACHE_IN_BFLOAT16 = "MEGATRON_CACHE_IN_BFLOAT16"
    """With int4, int8 and bfloat16, the KV cache is bfloat16; off: float32, and answers differ by their rounding."""
    TILES = "MEGATRON_TILES"
    """Several rows of activations share one read of a weight; off: one row at a time."""
    PREFETCH = "MEGATRON_PREFETCH"
    """Weights in bfloat16, int8 and int4 are prefetched."""
    SHARED_KEYS = "MEGATRON_SHARED_KEYS"
    """Tokens of a prompt share one gather of their visible keys; off: each group of rows gathers its own."""
    PACKED_LINEAR = "MEGATRON_PACKED_LINEAR"
    """Where torch computes: weights are packed for oneDNN; off: as they were read."""
    SHORT_SLICES = "MEGATRON_SHORT_SLICES"
    """The coordinator requests scheduler time slices of 0.1 ms from Linux."""


OF_A_STEP = (Switch.TILES, Switch.PREFETCH, Switch.SHARED_KEYS)
"""Switches that change how a compiled step is computed, but not its result."""


def is_on(switch: Switch, environment: Mapping[str, str] = os.environ) -> bool:
    """Raises InvalidSwitchError."""
    value = environment.get(switch, "1")
    if value not in ("0", "1"):
        raise InvalidSwitchError(f"{switch}={value!r}: use 0 to switch it off, 1 or nothing to leave it on")
    return value == "1"
