"""Packs weights into panels. src/kernels.h and, for K-quants, src/matmul_k.h describe the panels."""

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
"""Number of inputs in a block of the integer formats. In every format, a matrix must have whole blocks of inputs."""
SUPER_BLOCK = 256
"""Number of inputs in a block of the K-quants."""
PANEL_FORMATS = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "float16": FLOAT16,
    "int8": INT8,
    "int5": INT5,
    "int4": INT4,
    "q2_k": abi.Q2_K,
    "q3_k": abi.Q3_K,
    "q4_k": abi.Q4_K,
    "q5_k": abi.Q5_K,
    "q6_k": abi.Q6_K,
}
"""Number formats of packed matrices, by name."""
INTEGER_FORMATS = frozenset(PANEL_FORMATS.values()) - {FLOAT32, BFLOAT16, FLOAT16}
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
"""GGML types that can be packed without changing any value."""
_DENSE_KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
DENSE_DTYPES = frozenset(_DENSE_KINDS)
"""Types of dense weights that can be packed without converting them first."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [outputs, inputs], packed as panels of PANEL outputs.

    data: uint8 [outputs / PANEL, bytes of a panel].
    """

    format: int
    outputs: int
    inputs: int
    data: torch.Tensor

    @property
    def record(self) -> Matrix:
        """The matrix as a ctypes structure, which the library's functions take as an argument.

        `data` must be contiguous, and must exist as long as the structure is used.
        """
        return Matrix(self.format, self.inputs, self.outputs, self.data.data_ptr())

    def part(self, rows: slice, columns: slice) -> PackedMatrix | None:
        """Return a view of some rows and columns.

        Return None if `rows` are not whole panels, or if `columns` are not whole blocks.

        rows, columns: slices with step 1.
        """
        block = block_inputs(self.format)
        (row, last_row, _), (column, last_column, _) = rows.indices(self.outputs), columns.indices(self.inputs)
        if row % PANEL or last_row % PANEL or column % block or last_column % block:
            return None
        size = self.data.shape[1] * block // self.inputs
        data = self.data[row // PANEL : last_row // PANEL, column // block * size : last_column // block * size]
        return PackedMatrix(self.format, last_row - row, last_column - column, data)

    def look_up(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the rows `ids_T` of the matrix as x_TK in float32. The matrix must be contiguous."""
        x_TK, ids = torch.empty(len(ids_T), self.inputs), ids_T.to(torch.int64).contiguous()
        library().megatron_look_up(self.record, ids.data_ptr(), len(ids), x_TK.data_ptr())
        return x_TK

    def dequantize(self) -> torch.Tensor:
        """Return the whole matrix as weight_NK in float32. The matrix must be contiguous."""
        return self.look_up(torch.arange(self.outputs))


def fits(outputs: int, inputs: int) -> bool:
    """Return whether a weight of this size can be packed.

    The weight must have whole panels of outputs and whole blocks of inputs.
    """
    return outputs % PANEL == 0 and inputs % BLOCK == 0


def block_inputs(format: int) -> int:
    """Return the number of inputs in a block. A matrix can be packed only if it has whole blocks of inputs."""
    return SUPER_BLOCK if format in (abi.Q2_K, abi.Q3_K, abi.Q4_K, abi.Q5_K, abi.Q6_K) else BLOCK


def panel_bytes(format: int, inputs: int) -> int:
    """Return the size in bytes of a panel of a matrix with this format and number of inputs."""
    size: int = library().megatron_matrix_bytes(Matrix(format, inputs, PANEL, None))
    return size


def packed_format(weight: QuantizedTensor, name: str) -> int:
    """Return the format in which pack() stores a quantized weight.

    name: format chosen for the model. If it is int8 or int4, a weight that is already quantized keeps its own format.
    """
    return _KEPT[weight.kind] if name in ("int8", "int4") else PANEL_FORMATS[name]


def pack(
    weight: torch.Tensor | QuantizedTensor | Sequence[QuantizedTensor], name: str, memory: WeightMemory | None = None
) -> PackedMatrix:
    """Pack a weight in the format `name`, without copying it first.

    weight: one weight, or several weights with the same packed_format(), whose rows are concatenated. Each of them must
            satisfy fits().
    name: float32, bfloat16, float16, int8 or int4. With int8 or int4, a weight that is already quantized keeps its own
          format.
    memory: allocates the panels. If None, torch allocates them.
    """
    memory = memory or WeightMemory()
    if isinstance(weight, torch.Tensor):
        parts, format = [_dense_rows(weight)], PANEL_FORMATS[name]
    else:
        quantized = [weight] if isinstance(weight, QuantizedTensor) else weight
        parts = [(part.kind, part.blocks_NB, part.shape) for part in quantized]
        format = packed_format(quantized[0], name)
    inputs = parts[0][2][1]
    outputs = sum(shape[0] for _, _, shape in parts)
    data = memory.take_panels(outputs // PANEL, panel_bytes(format, inputs))
    first = 0
    for kind, rows, shape in parts:
        values = rows if rows.stride(1) == 1 else rows.contiguous()
        row_bytes, panels = values.stride(0) * values.element_size(), shape[0] // PANEL
        matrix = Matrix(format, inputs, shape[0], None)
        packing = Packing(kind, values.data_ptr(), row_bytes, matrix, data[first].data_ptr())
        library().megatron_pack(packing, 0, panels)
        first += panels
    return PackedMatrix(format, outputs, inputs, data)


def join(parts: Sequence[PackedMatrix], memory: WeightMemory | None = None) -> PackedMatrix:
    """Return one contiguous matrix with the rows of all `parts`, which must have the same format.

    The matrix is a view if the parts are adjacent in memory. Otherwise, it is a copy.
    """
    first = parts[0]
    outputs, size = sum(part.outputs for part in parts), first.data.shape[1]
    if _are_adjacent([part.data for part in parts]):
        data = first.data.as_strided((outputs // PANEL, size), (size, 1))
    else:
        data = (memory or WeightMemory()).take_panels(outputs // PANEL, size)
        torch.cat([part.data for part in parts], out=data)
    return PackedMatrix(first.format, outputs, first.inputs, data)


def _are_adjacent(pieces: Sequence[torch.Tensor]) -> bool:
    end = pieces[0].data_ptr()
    for piece in pieces:
        same = piece.untyped_storage().data_ptr() == pieces[0].untyped_storage().data_ptr()
        if not piece.is_contiguous() or not same or piece.data_ptr() != end:
            return False
        end += piece.nbytes
    return True


def _dense_rows(weight_NK: torch.Tensor) -> tuple[int, torch.Tensor, tuple[int, int]]:
    """Return the GGML type, the rows and the shape of a dense weight.

    A weight of a type that the library cannot read is converted to float32.
    """
    rows = weight_NK if weight_NK.dtype in _DENSE_KINDS else weight_NK.float()
    outputs, inputs = rows.shape
    return _DENSE_KINDS[rows.dtype], rows, (outputs, inputs)
