"""Packing of weights into the panels of src/kernels.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_kernels.cpu.library import FLOAT32, Matrix
from megatron_kernels.cpu.memory import WeightMemory
from megatron_kernels.quantized import Q4_0, Q4_1, Q8_0, QuantizedTensor

QUANTIZED_KINDS = frozenset((Q4_0, Q4_1, Q8_0))
BLOCK = 32


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [outputs, inputs] as panels. `data`: their memory."""

    format: int
    outputs: int
    inputs: int
    data: torch.Tensor

    @property
    def record(self) -> Matrix:
        return Matrix(self.format, self.inputs, self.outputs, self.data.data_ptr())


def fits(outputs: int, inputs: int) -> bool:
    """Whether a weight of this size can be packed: whole units of outputs, whole blocks of inputs."""
    return outputs % 16 == 0 and inputs % BLOCK == 0


def pack(
    weight: torch.Tensor | QuantizedTensor | Sequence[QuantizedTensor], name: str, memory: WeightMemory | None = None
) -> PackedMatrix:
    if isinstance(weight, QuantizedTensor):
        weight = [weight]
    if not isinstance(weight, torch.Tensor):
        weight = torch.cat([part.dequantize() for part in weight])
    outputs, inputs = weight.shape
    data = (memory or WeightMemory()).take(outputs * inputs * 4)
    data.view(torch.float32).view(-1, inputs, 16).copy_(weight.float().view(-1, 16, inputs).transpose(1, 2))
    return PackedMatrix(FLOAT32, outputs, inputs, data)
