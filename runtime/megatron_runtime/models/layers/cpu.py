"""Matrices that are packed for the C++ kernels, and the selection of a model's number formats.

The kernels are selected by the CPU's instruction sets, never by the CPU's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Literal

import torch

from megatron_kernels.cpu.library import PANEL, library
from megatron_kernels.cpu.memory import WeightMemory
from megatron_kernels.cpu.packing import (
    BLOCK,
    DENSE_DTYPES,
    INTEGER_FORMATS,
    PANEL_FORMATS,
    QUANTIZED_KINDS,
    PackedMatrix,
    fits,
    join,
    pack,
    packed_format,
    panel_bytes,
)
from megatron_kernels.cpu.thread_pool import shared_thread_pool
from megatron_kernels.quantized import BLOCK_SIZES, QuantizedTensor
from megatron_runtime.models.layers.linear import Linear, LinearFactory, Weight
from megatron_runtime.models.tensors import Checkpoint

Format = Literal["float32", "bfloat16", "float16", "int8", "int4"]


class PackedLinear(Linear):
    """A matrix that is packed for the C++ kernels. Activations are float32.

    matrices: the parts whose rows form the matrix. There are several parts if they have different formats.
    """

    def __init__(self, *matrices: PackedMatrix) -> None:
        self.matrices = matrices
        self.out_features, self.in_features = sum(matrix.outputs for matrix in matrices), matrices[0].inputs

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        x_TK = x_TK.to(torch.float32).contiguous()
        parts = [_multiply(matrix, x_TK) for matrix in self.matrices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def look_up(self, ids_T: torch.Tensor) -> torch.Tensor:
        assert len(self.matrices) == 1, "an embedding has one format"
        return self.matrices[0].look_up(ids_T)

    @property
    def num_bytes(self) -> int:
        return sum(matrix.data.nbytes for matrix in self.matrices)

    def dense(self) -> torch.Tensor:
        """Return a dense float32 copy of the packed matrix, [N, K]. The packing has rounded the values."""
        return torch.cat([matrix.dequantize() for matrix in self.matrices])

    def stored(self) -> list[tuple[str, torch.Tensor]]:
        return [(f"panels of format {matrix.format}", matrix.data) for matrix in self.matrices]


def _multiply(matrix: PackedMatrix, x_TK: torch.Tensor) -> torch.Tensor:
    y_TN = torch.empty(len(x_TK), matrix.outputs)
    pool = shared_thread_pool().handle
    if library().megatron_multiply(pool, matrix.record, x_TK.data_ptr(), len(x_TK), y_TN.data_ptr()) != 0:
        raise MemoryError(f"the memory of a product of {len(x_TK)} rows cannot be allocated")
    return y_TN


class PackedLinears(LinearFactory):
    """A factory of packed matrices. A matrix whose size cannot be packed stays dense, with type float32.

    format: format to which dense weights are packed. Weights that are stored quantized or packed keep their stored
            blocks if `format` is an integer format. Otherwise, they are converted to `format`.
    """

    def __init__(self, format: Format) -> None:
        self._format, self._table_format = format, table_format(format)
        self.quantized_kinds, self.dense_dtypes = QUANTIZED_KINDS, DENSE_DTYPES
        self.panel_formats = INTEGER_FORMATS if format in ("int8", "int4") else frozenset((PANEL_FORMATS[format],))
        self._memory = WeightMemory()

    def value_bytes(self, dtype: torch.dtype) -> float:
        return panel_bytes(PANEL_FORMATS[self._format], BLOCK) / (PANEL * BLOCK)

    def settle(self) -> None:
        """Merge the memory pages of the weights into larger pages. Call this after the last matrix has been created."""
        self._memory.join_pages()

    def dense(self, weight: Weight) -> torch.Tensor:
        return super().dense(weight).to(torch.float32, copy=True)

    def linear(self, weight_NK: Weight) -> Linear:
        return self._pack(weight_NK, self._format) or super().linear(weight_NK)

    def embedding(self, weight_VD: Weight) -> Linear:
        return self._pack(weight_VD, self._table_format) or super().embedding(weight_VD)

    def _pack(self, weight: Weight, format: str) -> PackedLinear | None:
        if isinstance(weight, torch.Tensor):
            return PackedLinear(pack(weight, format, self._memory)) if fits(*weight.shape) else None
        panels = [part for part in weight if isinstance(part, PackedMatrix)]
        if panels:
            by_format = groupby(panels, key=lambda part: part.format)
            return PackedLinear(*(join(list(parts), self._memory) for _, parts in by_format))
        blocks = [part for part in weight if isinstance(part, QuantizedTensor)]
        if not all(fits(*part.shape) for part in blocks):
            return None
        # If the parts keep their blocks, parts of different GGML types become separate matrices.
        groups = groupby(blocks, key=lambda part: packed_format(part, format))
        return PackedLinear(*(pack(list(parts), format, self._memory) for _, parts in groups))


def table_format(format: Format) -> Format:
    """Return the number format of embedding tables, given the format of the other matrices."""
    # Four bits are too few for embeddings, whose values are less evenly distributed than other weights.
    return "int8" if format == "int4" else format


@dataclass(frozen=True, slots=True)
class Numbers:
    """The number formats of a model. Activations are float32 between the kernels.

    weights: format of the matrices. Products with bfloat16 weights round their inputs to bfloat16 if the CPU can
             multiply bfloat16. Products with integer weights round their inputs to 8 bits.
    cache: type of keys and values in the KV cache.
    """

    weights: Format
    cache: torch.dtype

    def linears(self) -> LinearFactory:
        """Return a factory that packs matrices in the format `Numbers.weights`."""
        return PackedLinears(self.weights)


FORMATS: dict[str, Numbers] = {
    "float32": Numbers("float32", torch.float32),
    "bfloat16": Numbers("bfloat16", torch.bfloat16),
    "float16": Numbers("float16", torch.float16),
    "int8": Numbers("int8", torch.bfloat16),
    "int4": Numbers("int4", torch.bfloat16),
}


def select_numbers(name: str, stored: torch.dtype = torch.float32, *, is_quantized: bool = False) -> Numbers:
    """Return the number formats with which an engine computes.

    name:         "auto" or a Format.
    stored:       type of the checkpoint's matrices. "auto" keeps float16 and bfloat16 and converts any other type to
                  float32.
    is_quantized: whether the checkpoint's matrices are quantized. If so, "auto" selects bfloat16, whose error is
                  smaller than the quantization error.

    docs/measurements compares the speed of the formats by instruction set. Raises ValueError for an unknown name.
    """
    if name == "auto":
        keeps = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
        name = "bfloat16" if is_quantized else keeps.get(stored, "float32")
    if name not in FORMATS:
        raise ValueError(f"dtype={name!r} is not supported on a CPU: use auto, {', '.join(FORMATS)}")
    return FORMATS[name]


def numbers_of(name: str, checkpoint: Checkpoint) -> Numbers:
    """Return the number formats with which an engine computes the model of a checkpoint.

    name: as for select_numbers(), except that "auto" selects the format of the matrices if the checkpoint is packed.
    """
    if name == "auto" and checkpoint.panels_of is not None:
        name = checkpoint.panels_of
    matrices = {key: kind for key, kind in checkpoint.kinds.items() if len(kind.shape) == 2}
    largest = max(matrices, key=lambda key: prod(matrices[key].shape))
    is_quantized = checkpoint.blocks(largest, (slice(0, 1),), wanted=BLOCK_SIZES) is not None
    return select_numbers(name, matrices[largest].dtype, is_quantized=is_quantized)
