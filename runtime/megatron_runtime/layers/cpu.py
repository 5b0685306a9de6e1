"""What this machine's processor is good at, asked of the processor and never of its name."""

from __future__ import annotations

from pathlib import Path

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def computes_in_bfloat16() -> bool:
    """True where matrix products in bfloat16 run on instructions made for it (AMX, AVX512-BF16)."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def select_dtype(name: str) -> torch.dtype:
    """Return the type to compute in. `name`: "auto", "float32" or "bfloat16"."""
    if name == "auto":
        return torch.bfloat16 if computes_in_bfloat16() else torch.float32
    if name not in _DTYPES:
        raise ValueError(f"dtype={name!r} is not supported on a processor: use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


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
