"""Every optimisation of an engine on a processor that can be switched off, so that a benchmark can tell what it gives.

Each is an environment variable, read when an engine is made: "0" switches off, "1" or nothing leaves it on. Answers are
the same either way but where a line says otherwise. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum


class InvalidSwitchError(ValueError):
    """A switch is neither 0 nor 1. Names the variable, its value and the remedy."""


class Switch(StrEnum):
    """The variables."""

    NATIVE = "MEGATRON_NATIVE"
    """Packed matrices and compiled steps; off: the decoder in torch, where int8 and int4 do not run. Answers in float32
    differ where two tokens are as likely as each other, those in bfloat16 by rounding."""
    PARALLEL_LOAD = "MEGATRON_PARALLEL_LOAD"
    """All threads read and pack weights; off: one."""
    LARGE_PAGES = "MEGATRON_LARGE_PAGES"
    """Packed weights are moved into pages of 2 MiB after they were loaded; off: they stay in pages of 4 KiB."""
    CACHE_IN_BFLOAT16 = "MEGATRON_CACHE_IN_BFLOAT16"
    """Of int4, int8 and bfloat16; off: keys and values in float32, and answers differ by their rounding."""
    TILES = "MEGATRON_TILES"
    """Several rows of activations share one reading of a weight; off: one row at a time."""
    PREFETCH = "MEGATRON_PREFETCH"
    """Weights in bfloat16, int8 and int4 are asked for before they are needed."""
    SHARED_KEYS = "MEGATRON_SHARED_KEYS"
    """Tokens of a prompt share one gathering of the keys they see; off: each group of rows gathers its own."""
    PACKED_LINEAR = "MEGATRON_PACKED_LINEAR"
    """Where torch runs: weights are laid out anew for oneDNN; off: as they were read."""
    SHORT_SLICES = "MEGATRON_SHORT_SLICES"
    """The coordinator asks Linux for slices of 0.1 ms."""


OF_A_STEP = (Switch.TILES, Switch.PREFETCH, Switch.SHARED_KEYS)
"""Switches that change how a compiled step is computed and never its result."""


def is_on(switch: Switch, environment: Mapping[str, str] = os.environ) -> bool:
    """Raises InvalidSwitchError."""
    value = environment.get(switch, "1")
    if value not in ("0", "1"):
        raise InvalidSwitchError(f"{switch}={value!r}: use 0 to switch it off, 1 or nothing to leave it on")
    return value == "1"
