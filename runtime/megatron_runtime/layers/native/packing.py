"""From dense or quantised weights to the panels of tiles.py.

N outputs, K inputs, U units of 16 outputs, P panels of 8, B blocks of 32 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron_runtime.layers.native.records import BFLOAT16, FLOAT32, INT4, INT8, MATRIX
from megatron_runtime.layers.native.sizes import BLOCK, INT4_BLOCK_BYTES, INT8_BLOCK_BYTES
from megatron_runtime.layers.quantized import Q4_0, Q4_1, Q8_0, QuantizedTensor

QUANTIZED_KINDS = frozenset((Q4_0, Q4_1, Q8_0))
"""GGML types that are packed without a change of any value."""
_FORMATS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int4": INT4, "int8": INT8}


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
    """Pack a dense weight in the format of this name, a quantised one as it is."""
    if isinstance(weight, QuantizedTensor):
        return _pack_blocks(weight)
    outputs, inputs = weight.shape
    data = _PACKERS[name](weight)
    return PackedMatrix(_FORMATS[name], outputs, inputs, data.contiguous().view(torch.uint8).view(-1))


def _pack_float32(weight_NK: torch.Tensor) -> torch.Tensor:
    return weight_NK.float().unflatten(0, (-1, 16)).transpose(1, 2)


def _pack_bfloat16(weight_NK: torch.Tensor) -> torch.Tensor:
    weight_U16K2 = weight_NK.bfloat16().unflatten(0, (-1, 16)).unflatten(2, (-1, 2))
    return weight_U16K2.transpose(1, 2)


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


_PACKERS = {"float32": _pack_float32, "bfloat16": _pack_bfloat16, "int4": _pack_int4, "int8": _pack_int8}


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
