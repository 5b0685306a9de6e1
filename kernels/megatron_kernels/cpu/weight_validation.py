"""Validation of weights in the format of their file: their sum, and whether their values or scales are finite."""

from __future__ import annotations

import torch

from megatron_kernels.cpu import library as abi
from megatron_kernels.cpu.library import BFLOAT16, FLOAT16, FLOAT32, INT4, INT5, INT8, PANEL, library
from megatron_kernels.cpu.packing import PackedMatrix, block_inputs, panel_bytes
from megatron_kernels.quantized import BLOCK_SIZES, SCALES, QuantizedTensor

_WORD = 8
_EXPONENT, _BFLOAT16_EXPONENT = 0x7C00, 0x7F80
"""Bits of the exponent of float16, and of bfloat16 and the upper half of float32."""
_SCALES = {
    FLOAT16: (0, 512),
    BFLOAT16: (0, 512),
    INT8: (512, PANEL),
    INT5: (320, 2 * PANEL),
    INT4: (256, 2 * PANEL),
    abi.Q2_K: (0, 2 * PANEL),
    abi.Q3_K: (0, PANEL),
    abi.Q4_K: (0, 2 * PANEL),
    abi.Q5_K: (0, 2 * PANEL),
    abi.Q6_K: (0, PANEL),
}
"""Format of panels: first byte and number of the halves of a block that are no integers, as in src/kernels.h."""


def sum_and_finiteness(stored: QuantizedTensor) -> tuple[int, bool] | None:
    """Return (sum of all whole words of eight bytes, whether all scales are finite); None for strided rows.

    Equals the results of `quantized.py` and `checkpoints/checkpoint.py` in torch.
    """
    data = stored.blocks_NB
    if not data.is_contiguous():
        return None
    size, scales = BLOCK_SIZES[stored.kind][1], SCALES[stored.kind]
    halves = (scales.stop - scales.start) // 2
    return _sum(data), _are_finite(data, scales.start, data.numel() // size, size, halves, _EXPONENT)


def sum_and_finiteness_of_panels(matrix: PackedMatrix) -> tuple[int, bool]:
    """Return (sum of all words of eight bytes, whether all values or scales are finite)."""
    data = matrix.data.contiguous()
    if matrix.format == FLOAT32:
        return _sum(data), _are_finite(data, 2, data.numel() // 4, 4, 1, _BFLOAT16_EXPONENT)
    first, halves = _SCALES[matrix.format]
    size = panel_bytes(matrix.format, block_inputs(matrix.format))
    exponent = _BFLOAT16_EXPONENT if matrix.format == BFLOAT16 else _EXPONENT
    return _sum(data), _are_finite(data, first, data.numel() // size, size, halves, exponent)


def _sum(data: torch.Tensor) -> int:
    total: int = library().megatron_sum(data.data_ptr(), data.numel() // _WORD)
    return total - (1 << 64) if total >= 1 << 63 else total


def _are_finite(data: torch.Tensor, first: int, blocks: int, size: int, halves: int, exponent: int) -> bool:
    return bool(library().megatron_halves_are_finite(data.data_ptr() + first, blocks, size, halves, exponent))
