"""Validation of weights in the format of their file: their sum, and whether their scales are finite."""

from __future__ import annotations

import numpy as np

from megatron_kernels.cpu.compiled import entry
from megatron_kernels.cpu.entry_points import VALIDATE
from megatron_kernels.cpu.records import VALIDATION
from megatron_kernels.quantized import BLOCK_SIZES, SCALES, QuantizedTensor

_WORD = 8
_LOW, _HIGH = 0x7C00, 0x7C000000
"""The exponents of two float16 numbers in four bytes."""


def sum_and_finiteness(stored: QuantizedTensor) -> tuple[int, bool] | None:
    """Return (sum of all whole words of eight bytes, whether all scales are finite); None for strided rows.

    Equals the results of `quantized.py` and `checkpoints/verified.py` in torch.
    """
    data = stored.blocks_NB
    if not data.is_contiguous():
        return None
    size, scales = BLOCK_SIZES[stored.kind][1], SCALES[stored.kind]
    begin, mask = scales.start, _LOW | (_HIGH if scales.stop - scales.start == 4 else 0)
    if begin + 4 > size:
        # Read the last two bytes of a block as the end of four bytes inside it.
        begin, mask = begin - 2, _HIGH
    address = data.data_ptr()
    record = np.array(
        [(address, data.numel() // _WORD, address + begin, data.numel() // size, size, mask, 0, 0)], dtype=VALIDATION
    )
    entry()(VALIDATE, record.ctypes.data, 0, 0, 0)
    return int(record["sum"][0]), bool(record["is_finite"][0])
