"""What this machine's processor is good at, asked of the processor and never of its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron_kernels.cpu.compiled import is_supported
from megatron_kernels.cpu.switches import Switch, is_on

Format = Literal["float32", "bfloat16", "int8", "int4"]
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Numbers:
    """weights:     what matrices are kept in.
    activations: what is computed in.
    cache:       what keys and values are kept in.
    is_native:   compiled steps run them (layers/native), else torch.
    """

    weights: Format
    activations: torch.dtype
    cache: torch.dtype
    is_native: bool


def computes_in_bfloat16() -> bool:
    """True where matrix products in bfloat16 run on instructions made for it (AMX, AVX512-BF16)."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def has_native_steps() -> bool:
    """True where layers/native runs and is not switched off."""
    return is_on(Switch.NATIVE) and is_supported()


def select_numbers(name: str) -> Numbers:
    """Return how to compute. `name`: "auto" or a Format.

    Compiled steps read bfloat16 weights but compute in float32. Torch runs what has instructions for bfloat16.

    Raises ValueError naming what this processor has.
    """
    is_native = has_native_steps()
    cache = torch.bfloat16 if is_on(Switch.CACHE_IN_BFLOAT16) else torch.float32
    if name == "auto":
        name = "bfloat16" if computes_in_bfloat16() else "float32"
    if name == "float32":
        return Numbers("float32", torch.float32, torch.float32, is_native)
    if name == "bfloat16":
        if is_native and not computes_in_bfloat16():
            return Numbers("bfloat16", torch.float32, cache, True)
        return Numbers("bfloat16", torch.bfloat16, torch.bfloat16, False)
    allowed: tuple[Format, ...] = ("float32", "bfloat16", *(("int8", "int4") if is_native else ()))
    for format in allowed:
        if name == format:
            return Numbers(format, torch.float32, cache, True)
    raise ValueError(
        f"dtype={name!r} is not supported on this processor: use auto, {', '.join(allowed)}"
        + ("" if is_native else " (int8 and int4 need AVX2 and Linux)")
    )


def default_threads(quota: Path = _QUOTA) -> int:
    """Return torch's choice of threads, but no more than the whole processors that a container's limit allows.

    More threads than that would be stopped by turns while the others wait for them.

    quota: the file `cpu.max` of control groups v2; absent where there is no limit.
    """
    threads: int = torch.get_num_threads()
    if quota.is_file():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            threads = min(threads, max(1, int(allowed) // int(period)))
    return threads
