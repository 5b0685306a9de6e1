"""Packing of weights into the panels of src/kernels.h, and of src/matmul_k.h for K-quants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_kernels.cpu import library as abi
from megatron_kernels.cpu.library import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT4,
    INT5,
    INT8,
    PANEL,
    Matrix,
    Packing,
    library,
)
from megatron_kernels.cpu.memory import WeightMemory
from megatron_kernels.quantized import (
    BF16,
    F16,
    F32,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    QuantizedTensor,
)

BLOCK = 32
"""Inputs of a block of the integer formats. Every format needs whole blocks."""
_FORMATS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16, "int8": INT8, "int4": INT4}
_KEPT = {
    Q4_0: INT4,
    Q4_1: INT4,
    Q5_0: INT5,
    Q5_1: INT5,
    Q8_0: INT8,
    Q2_K: abi.Q2_K,
    Q3_K: abi.Q3_K,
    Q4_K: abi.Q4_K,
    Q5_K: abi.Q5_K,
    Q6_K: abi.Q6_K,
}
QUANTIZED_KINDS = frozenset(_KEPT)
"""GGML types that are packed without a change of any value."""
_DENSE_KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
DENSE_DTYPES = frozenset(_DENSE_KINDS)
"""Types of dense weights that are packed without a conversion before."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [outputs, inputs] as panels. `data`: their memory."""

    format: int
    outputs: int
    inputs: int
    data: torch.Tensor

    @property
    def record(self) -> Matrix:
        """Argument of the library's functions, valid as long as `data`."""
        return Matrix(self.format, self.inputs, self.outputs, self.data.data_ptr())


def fits(outputs: int, inputs: int) -> bool:
    """Return whether a weight of this size can be packed: whole panels of outputs, whole blocks of inputs."""
    return outputs % PANEL == 0 and inputs % BLOCK == 0


def packed_format(weight: QuantizedTensor, name: str) -> int:
    """Return the format that a quantized weight is packed in, given the name of the format of dense weights."""
    return _KEPT[weight.kind] if name in ("int8", "int4") else _FORMATS[name]


def pack(
    weight: torch.Tensor | QuantizedTensor | Sequence[QuantizedTensor], name: str, memory: WeightMemory | None = None
) -> PackedMatrix:
    """Return a weight packed in the format of this name, directly from its memory.

    weight: one weight, or several of one packed_format() whose rows are concatenated; each must fit by itself.
    name: float32, bfloat16, float16, int8 or int4. Quantized weights keep their blocks if it is an integer format.
    memory: where the panels are allocated; None allocates separately.
    """
    memory = memory or WeightMemory()
    if isinstance(weight, torch.Tensor):
        parts, format = [_dense_rows(weight)], _FORMATS[name]
    else:
        quantized = [weight] if isinstance(weight, QuantizedTensor) else weight
        parts = [(part.kind, part.blocks_NB, part.shape) for part in quantized]
        format = packed_format(quantized[0], name)
    inputs = parts[0][2][1]
    matrices = [Matrix(format, inputs, shape[0], None) for _, _, shape in parts]
    sizes = [library().megatron_matrix_bytes(matrix) for matrix in matrices]
    data = memory.take(sum(sizes))
    address = data.data_ptr()
    for (kind, rows, _), matrix, size in zip(parts, matrices, sizes, strict=True):
        values = rows if rows.stride(1) == 1 else rows.contiguous()
        row_bytes = values.stride(0) * values.element_size()
        packing = Packing(kind, values.data_ptr(), row_bytes, matrix, address)
        library().megatron_pack(packing, 0, matrix.outputs // PANEL)
        address += size
    return PackedMatrix(format, sum(matrix.outputs for matrix in matrices), inputs, data)


def _dense_rows(weight_NK: torch.Tensor) -> tuple[int, torch.Tensor, tuple[int, int]]:
    """Return (GGML type, rows, shape) of a dense weight."""
    rows = weight_NK if weight_NK.dtype in _DENSE_KINDS else weight_NK.float()
    outputs, inputs = rows.shape
    return _DENSE_KINDS[rows.dtype], rows, (outputs, inputs)
