"""Sizes that affect only the speed of a step, chosen when an engine is created. No numba."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from megatron_kernels.cpu.records import BFLOAT16, FLOAT32, INT4
from megatron_kernels.cpu.sizes import MOST_INT4_ROWS, MOST_INT8_ROWS, MOST_ROWS
from megatron_kernels.cpu.switches import InvalidSwitchError, Switch, is_on

TUNING_VARIABLE = "MEGATRON_NATIVE_TUNING"
"""Environment variable for benchmarks: name=number,… replaces defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The defaults were chosen on CPUs with AVX2; `bench/switches.py --tuning` measures other values.

    tile_rows:   limit of activation rows that share one read of a weight; a format's own limit applies too.
    ahead:       prefetch distance of weights in bytes.
    query_block: tokens of a prompt that share one gather of the keys.
    """

    tile_rows: int = MOST_ROWS
    ahead: int = 2048
    query_block: int = 48

    def rows_of(self, form: int) -> int:
        """Of a tile of this format."""
        if form in (FLOAT32, BFLOAT16):
            return min(self.tile_rows, MOST_ROWS)
        return min(self.tile_rows, MOST_INT4_ROWS if form == INT4 else MOST_INT8_ROWS)


_LEAST = Tuning(tile_rows=1, ahead=0, query_block=1)
_SWITCHES = {
    "tile_rows": Switch.TILES,
    "ahead": Switch.PREFETCH,
    "query_block": Switch.SHARED_KEYS,
}


def tuning(environment: Mapping[str, str] = os.environ) -> Tuning:
    """Return the sizes set by the switches and TUNING_VARIABLE.

    Raises InvalidSwitchError naming the variable, its value and the remedy.
    """
    found = Tuning()
    for item in filter(None, environment.get(TUNING_VARIABLE, "").split(",")):
        name, _, value = item.partition("=")
        known = [field.name for field in fields(Tuning)]
        if name not in known or not value.isdecimal() or int(value) < getattr(_LEAST, name):
            raise InvalidSwitchError(
                f"{TUNING_VARIABLE} has {item!r}: want name=number with {', '.join(known)}, each at least "
                f"{', '.join(str(getattr(_LEAST, each)) for each in known)}"
            )
        found = replace(found, **{name: int(value)})
    off = {name: getattr(_LEAST, name) for name, switch in _SWITCHES.items() if not is_on(switch, environment)}
    return replace(found, **off)
