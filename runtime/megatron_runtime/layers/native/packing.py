"""From dense or quantised weights to the panels of tiles.py.

N outputs, K inputs, U units of 16 outputs, P panels of 8, B blocks of 32 inputs.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch

from megatron_runtime.layers.native.compiled import entry
from megatron_runtime.layers.native.entry_points import PACK
from megatron_runtime.layers.native.records import (
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
from megatron_runtime.layers.native.sizes import BLOCK, INT4_BLOCK_BYTES, INT8_BLOCK_BYTES, SQUARE_BYTES, UNIT
from megatron_runtime.layers.quantized import Q4_0, Q4_1, Q8_0, QuantizedTensor

QUANTIZED_KINDS = frozenset((Q4_0, Q4_1, Q8_0))
"""GGML types that are packed as they are, without a change of any value."""
_FORMATS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int4": INT4, "int8": INT8}
_BLOCK_SOURCES = {Q4_0: FROM_Q4_0, Q4_1: FROM_Q4_1, Q8_0: FROM_Q8_0}
_FLOAT_SOURCES = {torch.float32: FROM_FLOAT32, torch.bfloat16: FROM_BFLOAT16, torch.float16: FROM_FLOAT16}
_LARGE = 1 << 20
"""Bytes from which on memory is had from the system in one piece."""


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
        return np.array([(self.format, self.data.data_ptr(), self.inputs, self.outputs)], dtype=MATRIX)


def fits(outputs: int, inputs: int) -> bool:
    """Whether a weight of this size can be packed: whole units of outputs, whole blocks of inputs."""
    return outputs % 16 == 0 and inputs % BLOCK == 0


def pack(weight: torch.Tensor | QuantizedTensor, name: str) -> PackedMatrix:
    """Pack a weight in the format of this name; a quantised one as it is, where that is an integer format."""
    if name in ("float32", "bfloat16"):
        return _pack_floats(weight, _FORMATS[name])
    if isinstance(weight, QuantizedTensor):
        return _pack_blocks(weight)
    outputs, inputs = weight.shape
    return PackedMatrix(_FORMATS[name], outputs, inputs, _PACKERS[name](weight))


def _pack_floats(weight: torch.Tensor | QuantizedTensor, format: int) -> PackedMatrix:
    """From where the weight lies straight into panels: no other copy of it is made."""
    outputs, inputs = weight.shape
    if isinstance(weight, QuantizedTensor):
        source, rows = _BLOCK_SOURCES[weight.kind], weight.blocks_NB
    else:
        rows = weight if weight.dtype in _FLOAT_SOURCES else weight.float()
        source = _FLOAT_SOURCES[rows.dtype]
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    data = _memory(outputs * inputs * (4 if format == FLOAT32 else 2))
    packed = PackedMatrix(format, outputs, inputs, data)
    matrix, square = packed.record, np.empty(SQUARE_BYTES, dtype=np.uint8)
    row_bytes = rows.stride(0) * rows.element_size()
    packing = np.array([(source, rows.data_ptr(), row_bytes, matrix.ctypes.data, square.ctypes.data)], dtype=PACKING)
    entry()(PACK, packing.ctypes.data, 0, outputs // UNIT, 0)
    return packed


def _memory(size: int) -> torch.Tensor:
    """uint8 [size]. Large pieces are mappings of their own, whose pages the system provides all at once: two thirds of
    the time that it takes to touch them one by one."""
    if size < _LARGE or not hasattr(mmap, "MAP_POPULATE"):
        return torch.empty(size, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)


def _pack_int4(weight_NK: torch.Tensor) -> torch.Tensor:
    """Sixteen steps from the least to the largest of each 32 values."""
    weight_NB32 = weight_NK.float().unflatten(1, (-1, BLOCK))
    least_NB1, most_NB1 = weight_NB32.amin(-1, keepdim=True), weight_NB32.amax(-1, keepdim=True)
    scale_NB1 = ((most_NB1 - least_NB1) / 15).half()
    offset_NB1 = least_NB1.half()
    steps = (weight_NB32 - offset_NB1.float()) / scale_NB1.float()
    nibbles = steps.nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(0, 15).to(torch.uint8)
    return _int4_panels(nibbles, scale_NB1[..., 0], offset_NB1[..., 0])


def _pack_int8(weight_NK: torch.Tensor) -> torch.Tensor:
    weight_NB32 = weight_NK.float().unflatten(1, (-1, BLOCK))
    scale_NB1 = (weight_NB32.abs().amax(-1, keepdim=True) / 127).half()
    steps = (weight_NB32 / scale_NB1.float()).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-127, 127)
    return _int8_panels(steps.to(torch.int8), scale_NB1[..., 0])


_PACKERS = {"int4": _pack_int4, "int8": _pack_int8}


def _pack_blocks(weight: QuantizedTensor) -> PackedMatrix:
    outputs, inputs = weight.shape
    size = {Q4_0: 18, Q4_1: 20, Q8_0: 34}[weight.kind]
    blocks_NBS = weight.blocks_NB.reshape(outputs, inputs // BLOCK, size)
    scale_NB = blocks_NBS[..., :2].contiguous().view(torch.float16)[..., 0]
    if weight.kind == Q8_0:
        data = _int8_panels(blocks_NBS[..., 2:].view(torch.int8), scale_NB)
        return PackedMatrix(INT8, outputs, inputs, data)
    if weight.kind == Q4_1:
        offset_NB = blocks_NBS[..., 2:4].contiguous().view(torch.float16)[..., 0]
    else:
        offset_NB = scale_NB * -8
    # The file holds inputs 0 … 15 in low halves and 16 … 31 in high halves, as a panel does.
    return PackedMatrix(INT4, outputs, inputs, _int4_panels_of_bytes(blocks_NBS[..., size - 16 :], scale_NB, offset_NB))


def _int4_panels(nibbles_NB32: torch.Tensor, scale_NB: torch.Tensor, offset_NB: torch.Tensor) -> torch.Tensor:
    return _int4_panels_of_bytes(nibbles_NB32[..., :16] | (nibbles_NB32[..., 16:] << 4), scale_NB, offset_NB)


def _int4_panels_of_bytes(bytes_NB16: torch.Tensor, scale_NB: torch.Tensor, offset_NB: torch.Tensor) -> torch.Tensor:
    outputs, blocks, _ = bytes_NB16.shape
    panels = torch.empty(outputs // 8, blocks, INT4_BLOCK_BYTES, dtype=torch.uint8)
    # Four inputs are one word: [panel, output, block, word] to [panel, block, word, output].
    words = bytes_NB16.contiguous().view(torch.int32).view(-1, 8, blocks, 4)
    panels[..., :128].view(torch.int32).view(-1, blocks, 4, 8).copy_(words.permute(0, 2, 3, 1))
    panels[..., 128:144].view(torch.float16).copy_(scale_NB.view(-1, 8, blocks).transpose(1, 2))
    panels[..., 144:].view(torch.float16).copy_(offset_NB.view(-1, 8, blocks).transpose(1, 2))
    return panels.view(-1)


def _int8_panels(values_NB32: torch.Tensor, scale_NB: torch.Tensor) -> torch.Tensor:
    outputs, blocks, _ = values_NB32.shape
    panels = torch.empty(outputs // 8, blocks, INT8_BLOCK_BYTES, dtype=torch.uint8)
    words = values_NB32.contiguous().view(torch.int32).view(-1, 8, blocks, 8)
    panels[..., :256].view(torch.int32).view(-1, blocks, 8, 8).copy_(words.permute(0, 2, 3, 1))
    panels[..., 256:].view(torch.float16).copy_(scale_NB.view(-1, 8, blocks).transpose(1, 2))
    return panels.view(-1)
