"""The number formats that a CPU supports, determined by its instruction sets and never by its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_kernels.cpu.compiled import is_supported
from megatron_kernels.cpu.switches import Switch, is_on
from megatron_runtime.models.layers.compiled_linear import Format, NativeLinears
from megatron_runtime.models.layers.linear import LinearFactory

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Numbers:
    """Number formats of a model.

    weights:     format of the matrices.
    activations: type of the computation.
    cache:       type of keys and values.
    is_native:   compiled code runs the steps, else torch.
    """

    weights: Format
    activations: torch.dtype
    cache: torch.dtype
    is_native: bool

    def linears(self) -> LinearFactory:
        """Return a factory of matrices in this format."""
        return NativeLinears(self.weights) if self.is_native else LinearFactory()


def computes_in_bfloat16() -> bool:
    """Return whether the CPU has instructions for matrix products in bfloat16 (AMX, AVX512-BF16)."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def select_numbers(name: str) -> Numbers:
    """Return the number formats to compute with. name: "auto" or a Format.

    Compiled steps read bfloat16 weights but compute in float32. Torch runs bfloat16 if the CPU has instructions for it.
    Raises ValueError naming the formats that this CPU supports.
    """
    is_native = is_on(Switch.NATIVE) and is_supported()
    cache = torch.bfloat16 if is_on(Switch.CACHE_IN_BFLOAT16) else torch.float32
    supported = {"float32": Numbers("float32", torch.float32, torch.float32, is_native)}
    if is_native:
        supported["bfloat16"] = Numbers("bfloat16", torch.float32, cache, True)
        supported["int8"] = Numbers("int8", torch.float32, cache, True)
        supported["int4"] = Numbers("int4", torch.float32, cache, True)
    if not is_native or computes_in_bfloat16():
        supported["bfloat16"] = Numbers("bfloat16", torch.bfloat16, torch.bfloat16, False)
    if name == "auto":
        name = "bfloat16" if computes_in_bfloat16() else "float32"
    if name not in supported:
        raise ValueError(
            f"dtype={name!r} is not supported on this CPU: use auto, {', '.join(supported)}"
            + ("" if is_native else " (int8 and int4 need AVX2 and Linux)")
        )
    return supported[name]


def default_threads(quota: Path = _QUOTA) -> int:
    """Return torch's number of threads, but at most the whole CPUs that a container's limit allows: the kernel would
    stop further threads in turn while the others wait for them.

    quota: the file `cpu.max` of control groups v2; absent without a limit.
    """
    threads: int = torch.get_num_threads()
    if quota.is_file():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            threads = min(threads, max(1, int(allowed) // int(period)))
    return threads
