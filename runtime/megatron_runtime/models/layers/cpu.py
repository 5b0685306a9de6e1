"""Packed matrices for compiled code on the CPU, and the number formats that a CPU supports.

The instruction sets of a CPU determine its number formats, never its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron_kernels.cpu.library import library
from megatron_kernels.cpu.memory import WeightMemory
from megatron_kernels.cpu.packing import QUANTIZED_KINDS, PackedMatrix, fits, pack
from megatron_kernels.cpu.switches import Switch, is_on
from megatron_kernels.cpu.thread_pool import shared_thread_pool
from megatron_kernels.quantized import QuantizedTensor
from megatron_runtime.models.layers.linear import Linear, LinearFactory, Weight

Format = Literal["float32", "bfloat16", "int8", "int4"]

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class NativeLinear(Linear):
    """A matrix that is packed for the C++ kernels; activations are float32."""

    def __init__(self, matrix: PackedMatrix) -> None:
        self.matrix = matrix
        self.out_features, self.in_features = matrix.outputs, matrix.inputs
        self._record = matrix.record

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        x_TK = x_TK.to(torch.float32).contiguous()
        y_TN = torch.empty(len(x_TK), self.out_features)
        pool = shared_thread_pool().handle
        if library().megatron_multiply(pool, self._record, x_TK.data_ptr(), len(x_TK), y_TN.data_ptr()) != 0:
            raise MemoryError(f"the memory of a product of {len(x_TK)} rows cannot be allocated")
        return y_TN

    def look_up(self, ids_T: torch.Tensor) -> torch.Tensor:
        x_TK, ids = torch.empty(len(ids_T), self.in_features), ids_T.to(torch.int64).contiguous()
        library().megatron_look_up(self._record, ids.data_ptr(), len(ids), x_TK.data_ptr())
        return x_TK

    @property
    def num_bytes(self) -> int:
        return self.matrix.data.nbytes

    def dense(self) -> torch.Tensor:
        """Return weight_NK in float32, as it was rounded."""
        return self.look_up(torch.arange(self.out_features))


class NativeLinears(LinearFactory):
    """Creates packed matrices. A matrix whose size cannot be packed stays dense, of type float32.

    format: of dense weights. Quantized weights keep their blocks if the format is an integer one, else they are
            unpacked into the format.
    """

    def __init__(self, format: Format) -> None:
        # Four bits are too few for embeddings, whose values are less evenly distributed than other weights.
        self._format, self._table_format = format, "int8" if format == "int4" else format
        self.quantized_kinds = QUANTIZED_KINDS
        self._memory = WeightMemory()

    def settle(self) -> None:
        """Join the pages of the weights into larger ones, after the last matrix."""
        if is_on(Switch.LARGE_PAGES):
            self._memory.join_pages()

    def linear(self, weight_NK: Weight) -> Linear:
        matrix = self._pack(weight_NK, self._format)
        return super().linear(weight_NK) if matrix is None else NativeLinear(matrix)

    def embedding(self, weight_VD: Weight) -> Linear:
        matrix = self._pack(weight_VD, self._table_format)
        return super().embedding(weight_VD) if matrix is None else NativeLinear(matrix)

    def _pack(self, weight: Weight, format: str) -> PackedMatrix | None:
        parts: Sequence[torch.Tensor | QuantizedTensor] = [weight] if isinstance(weight, torch.Tensor) else weight
        return pack(weight, format, self._memory) if all(fits(*part.shape) for part in parts) else None


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
    is_native = True
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
    """Return torch's number of threads, but at most the whole CPUs that a container's limit allows.

    The kernel would suspend any further thread in each period, while the other threads wait for it.

    quota: the file `cpu.max` of control groups v2; absent without a limit.
    """
    threads: int = torch.get_num_threads()
    if quota.is_file():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            threads = min(threads, max(1, int(allowed) // int(period)))
    return threads
