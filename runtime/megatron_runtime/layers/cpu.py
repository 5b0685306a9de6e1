"""What this machine's processor is good at, asked of the processor and never of its name."""

from __future__ import annotations

import torch


def computes_in_bfloat16() -> bool:
    """True where matrix products in bfloat16 run on instructions made for it (AMX, AVX512-BF16)."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def select_dtype(name: str) -> torch.dtype:
    """Return the type to compute in. `name`: "auto", "float32" or "bfloat16"."""
    if name == "auto":
        return torch.bfloat16 if computes_in_bfloat16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
