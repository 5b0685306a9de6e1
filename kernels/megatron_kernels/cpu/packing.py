"""Packing of dense and quantised weights into the panels of tiles.py.

N outputs, K inputs, U units of 16 outputs, P panels of 8, B blocks of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_kernels.cpu.compiled import entry
from megatron_kernels.cpu.entry_points import PACK
from megatron_kernels.cpu.memory import WeightMemory
from megatron_kernels.cpu.records import (
    BFLOAT16,
    FLOAT32,
    FROM_BFLOAT16,
    FROM_FLOAT16,
    FROM_FLOAT32,
    FROM_Q4_0,
    FROM_Q4_1,
    FROM_Q8_0,
    INT4,
    INT8,
    MATRIX,
    PACKING,
)
from megatron_kernels.cpu.sizes import BLOCK, INT4_BLOCK_BYTES, INT8_BLOCK_BYTES, SQUARE_BYTES, UNIT
from megatron_kernels.cpu.tuning import tuning
from megatron_kernels.quantized import Q4_0, Q4_1, Q8_0, QuantizedTensor

QUANTIZED_KINDS = frozenset((Q4_0, Q4_1, Q8_0))
"""GGML types that are packed without a change of any value."""
_FORMATS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int4": INT4, "int8": INT8}
_BLOCK_SOURCES = {Q4_0: FROM_Q4_0, Q4_1: FROM_Q4_1, Q8_0: FROM_Q8_0}
_FLOAT_SOURCES = {torch.float32: FROM_FLOAT32, torch.bfloat16: FROM_BFLOAT16, torch.float16: FROM_FLOAT16}
_VALUE_BYTES = {FLOAT32: 4.0, BFLOAT16: 2.0, INT4: INT4_BLOCK_BYTES / (8 * BLOCK), INT8: INT8_BLOCK_BYTES / (8 * BLOCK)}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [outputs, inputs] as panels. `data`: their memory."""

    format: int
    outputs: int
    inputs: int
    data: torch.Tensor

    @property
    def record(self) -> np.ndarray:
        """MATRIX[1]"""
        chosen = tuning()
        words = (
            self.format,
            self.data.data_ptr(),
            self.inputs,
            self.outputs,
            chosen.rows_of(self.format),
            chosen.ahead,
        )
        return np.array([words], dtype=MATRIX)


def fits(outputs: int, inputs: int) -> bool:
    """Whether a weight of this size can be packed: whole units of outputs, whole blocks of inputs."""
    return outputs % 16 == 0 and inputs % BLOCK == 0


def pack(
    weight: torch.Tensor | QuantizedTensor | Sequence[QuantizedTensor], name: str, memory: WeightMemory | None = None
) -> PackedMatrix:
    """Pack a weight in the format of this name. A quantised weight keeps its values in an integer format.

    weight: one weight, or several of one kind whose rows are concatenated; each must fit by itself.
    memory: where it is allocated; None allocates separately.
    """
    memory = memory or WeightMemory()
    if isinstance(weight, QuantizedTensor):
        weight = [weight]
    form = _FORMATS[name]
    if not isinstance(weight, torch.Tensor):
        if form in (INT4, INT8):
            form = INT8 if weight[0].kind == Q8_0 else INT4
        sources = [_Rows(_BLOCK_SOURCES[part.kind], part.blocks_NB, part.shape[0]) for part in weight]
        return _pack_rows(sources, form, weight[0].shape[1], memory)
    outputs, inputs = weight.shape
    if form in (INT4, INT8):
        return PackedMatrix(form, outputs, inputs, _PACKERS[name](weight, memory))
    rows = weight if weight.dtype in _FLOAT_SOURCES else weight.float()
    return _pack_rows([_Rows(_FLOAT_SOURCES[rows.dtype], rows, outputs)], form, inputs, memory)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where some rows of a weight lie, and as what."""

    source: int
    values: torch.Tensor
    count: int


def _pack_rows(parts: Sequence[_Rows], form: int, inputs: int, memory: WeightMemory) -> PackedMatrix:
    """Pack the weight directly from its memory, without another copy."""
    outputs = sum(part.count for part in parts)
    packed = PackedMatrix(form, outputs, inputs, memory.take(int(outputs * inputs * _VALUE_BYTES[form])))
    matrix, square = packed.record, np.empty(SQUARE_BYTES, dtype=np.uint8)
    for part in parts:
        rows = part.values if part.values.stride(1) == 1 else part.values.contiguous()
        row_bytes = rows.stride(0) * rows.element_size()
        words = (part.source, rows.data_ptr(), row_bytes, matrix.ctypes.data, square.ctypes.data)
        packing = np.array([words], dtype=PACKING)
        entry()(PACK, packing.ctypes.data, 0, part.count // UNIT, 0)
        matrix["address"] += int(part.count * inputs * _VALUE_BYTES[form])
    return packed


def _pack_int4(weight_NK: torch.Tensor, memory: WeightMemory) -> torch.Tensor:
    """Sixteen steps from the least to the largest of each 32 values."""
    weight_NB32 = weight_NK.float().unflatten(1, (-1, BLOCK))
    least_NB1, most_NB1 = weight_NB32.amin(-1, keepdim=True), weight_NB32.amax(-1, keepdim=True)
    scale_NB1 = ((most_NB1 - least_NB1) / 15).half()
    offset_NB1 = least_NB1.half()
    steps = (weight_NB32 - offset_NB1.float()) / scale_NB1.float()
    nibbles = steps.nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(0, 15).to(torch.uint8)
    return _int4_panels(nibbles, scale_NB1[..., 0], offset_NB1[..., 0], memory)


def _pack_int8(weight_NK: torch.Tensor, memory: WeightMemory) -> torch.Tensor:
    weight_NB32 = weight_NK.float().unflatten(1, (-1, BLOCK))
    scale_NB1 = (weight_NB32.abs().amax(-1, keepdim=True) / 127).half()
    steps = (weight_NB32 / scale_NB1.float()).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-127, 127)
    return _int8_panels(steps.to(torch.int8), scale_NB1[..., 0], memory)


_PACKERS = {"int4": _pack_int4, "int8": _pack_int8}


def _int4_panels(
    nibbles_NB32: torch.Tensor, scale_NB: torch.Tensor, offset_NB: torch.Tensor, memory: WeightMemory
) -> torch.Tensor:
    # Low halves are inputs 0 … 15, high halves 16 … 31.
    bytes_NB16 = nibbles_NB32[..., :16] | (nibbles_NB32[..., 16:] << 4)
    outputs, blocks, _ = bytes_NB16.shape
    panels = memory.take(outputs // 8 * blocks * INT4_BLOCK_BYTES).view(outputs // 8, blocks, INT4_BLOCK_BYTES)
    # Four inputs are one word: [panel, output, block, word] to [panel, block, word, output].
    words = bytes_NB16.contiguous().view(torch.int32).view(-1, 8, blocks, 4)
    panels[..., :128].view(torch.int32).view(-1, blocks, 4, 8).copy_(words.permute(0, 2, 3, 1))
    panels[..., 128:144].view(torch.float16).copy_(scale_NB.view(-1, 8, blocks).transpose(1, 2))
    panels[..., 144:].view(torch.float16).copy_(offset_NB.view(-1, 8, blocks).transpose(1, 2))
    return panels.view(-1)


def _int8_panels(values_NB32: torch.Tensor, scale_NB: torch.Tensor, memory: WeightMemory) -> torch.Tensor:
    outputs, blocks, _ = values_NB32.shape
    panels = memory.take(outputs // 8 * blocks * INT8_BLOCK_BYTES).view(outputs // 8, blocks, INT8_BLOCK_BYTES)
    words = values_NB32.contiguous().view(torch.int32).view(-1, 8, blocks, 8)
    panels[..., :256].view(torch.int32).view(-1, blocks, 8, 8).copy_(words.permute(0, 2, 3, 1))
    panels[..., 256:].view(torch.float16).copy_(scale_NB.view(-1, 8, blocks).transpose(1, 2))
    return panels.view(-1)
