"""Validates weights in the format in which their file stores them.

The functions compute a checksum of the weights, and whether their values or scales are finite.
"""

from __future__ import annotations

from ctypes import byref, c_uint64

import torch

from megatron_kernels.cpu import library as abi
from megatron_kernels.cpu.library import BFLOAT16, FLOAT16, FLOAT32, INT4, INT5, INT8, PANEL, library
from megatron_kernels.cpu.packing import PackedMatrix, block_inputs, panel_bytes
from megatron_kernels.quantized import BLOCK_SIZES, SCALES, QuantizedTensor

_WORD = 8
_EXPONENTS = {FLOAT16: 0x7C00_7C00_7C00_7C00, BFLOAT16: 0x7F80_7F80_7F80_7F80, FLOAT32: 0x7F80_0000_7F80_0000}
"""Mask of the exponent bits in a word of eight bytes, for formats whose panels contain floating-point values."""
_SCALES = {
    INT8: (512, PANEL),
    INT5: (320, 2 * PANEL),
    INT4: (256, 2 * PANEL),
    abi.Q2_K: (0, 2 * PANEL),
    abi.Q3_K: (0, PANEL),
    abi.Q4_K: (0, 2 * PANEL),
    abi.Q5_K: (0, 2 * PANEL),
    abi.Q6_K: (0, PANEL),
}
"""Byte offset and number of the float16 scales in a block (src/kernels.h), for formats whose panels contain
integers.
"""


def sum_and_finiteness(stored: QuantizedTensor) -> tuple[int, bool] | None:
    """Return the sum of the complete eight-byte words of a weight's blocks, and whether all scales are finite.

    Return None if the rows are not contiguous.

    The results are equal to the results that `quantized.py` and `checkpoints/checkpoint.py` compute with torch.
    """
    data = stored.blocks_NB
    if not data.is_contiguous():
        return None
    size, scales = BLOCK_SIZES[stored.kind][1], SCALES[stored.kind]
    halves = (scales.stop - scales.start) // 2
    return _sum(data), _are_finite(data, scales.start, data.numel() // size, size, halves)


def sum_and_finiteness_of_panels(matrix: PackedMatrix) -> tuple[int, bool]:
    """Return the sum of the eight-byte words of a packed matrix, and whether all its values are finite.

    If the format is quantized, the scales are checked instead of the values.
    """
    data = matrix.data.contiguous()
    exponents = _EXPONENTS.get(matrix.format)
    if exponents is not None:
        words = c_uint64()
        is_finite = library().megatron_sum_of_values(data.data_ptr(), data.numel() // _WORD, exponents, byref(words))
        return _signed(words.value), bool(is_finite)
    first, halves = _SCALES[matrix.format]
    size = panel_bytes(matrix.format, block_inputs(matrix.format))
    return _sum(data), _are_finite(data, first, data.numel() // size, size, halves)


def _sum(data: torch.Tensor) -> int:
    return _signed(library().megatron_sum(data.data_ptr(), data.numel() // _WORD))


def _signed(total: int) -> int:
    return total - (1 << 64) if total >= 1 << 63 else total


def _are_finite(data: torch.Tensor, first: int, blocks: int, size: int, halves: int) -> bool:
    return bool(library().megatron_scales_are_finite(data.data_ptr() + first, blocks, size, halves))
