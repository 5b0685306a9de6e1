"""The number formats that this machine's CPU supports, by its instruction sets and never by its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_kernels.cpu.compiled import is_supported
from megatron_kernels.cpu.switches import Switch, is_on
from megatron_runtime.models.layers.compiled_linear import Format, NativeLinears
from megatron_runtime.models.layers.linear import DenseLinears, LinearFactory

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Numbers:
    """weights:     format of the matrices.
    activations: type of the computation.
    cache:       type of keys and values.
    is_native:   compiled steps run them, else torch.
    """

    weights: Format
    activations: torch.dtype
    cache: torch.dtype
    is_native: bool

    def linears(self) -> LinearFactory:
        """A factory of matrices in this format."""
        return NativeLinears(self.weights) if self.is_native else DenseLinears(self.activations)


def computes_in_bfloat16() -> bool:
    """True where matrix products in bfloat16 run on instructions made for it (AMX, AVX512-BF16)."""
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def has_native_steps() -> bool:
    """True where compiled steps run and are not switched off."""
    return is_on(Switch.NATIVE) and is_supported()


def select_numbers(name: str) -> Numbers:
    """The numbers to compute with. name: "auto" or a Format.

    Compiled steps read bfloat16 weights but compute in float32. Torch runs bfloat16 where the CPU has instructions for
    it. Raises ValueError naming the formats that this CPU supports.
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
        f"dtype={name!r} is not supported on this CPU: use auto, {', '.join(allowed)}"
        + ("" if is_native else " (int8 and int4 need AVX2 and Linux)")
    )


def default_threads(quota: Path = _QUOTA) -> int:
    """Torch's choice of threads, but no more than the whole CPUs that a container's limit allows: the kernel would stop
    further threads in turn while the others wait for them.

    quota: the file `cpu.max` of control groups v2; absent where there is no limit.
    """
    threads: int = torch.get_num_threads()
    if quota.is_file():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            threads = min(threads, max(1, int(allowed) // int(period)))
    return threads
