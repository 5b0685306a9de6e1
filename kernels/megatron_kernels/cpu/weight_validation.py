"""Validation of weights in the format of their file: their sum, and whether their scales are finite."""

from __future__ import annotations

from megatron_kernels.cpu.library import library
from megatron_kernels.quantized import BLOCK_SIZES, SCALES, QuantizedTensor

_WORD = 8


def sum_and_finiteness(stored: QuantizedTensor) -> tuple[int, bool] | None:
    """Return (sum of all whole words of eight bytes, whether all scales are finite); None for strided rows.

    Equals the results of `quantized.py` and `checkpoints/verified.py` in torch.
    """
    data = stored.blocks_NB
    if not data.is_contiguous():
        return None
    size, scales = BLOCK_SIZES[stored.kind][1], SCALES[stored.kind]
    address, halves = data.data_ptr() + scales.start, (scales.stop - scales.start) // 2
    total = library().megatron_sum(data.data_ptr(), data.numel() // _WORD)
    is_finite = library().megatron_halves_are_finite(address, data.numel() // size, size, halves)
    return total - (1 << 64) if total >= 1 << 63 else total, bool(is_finite)
