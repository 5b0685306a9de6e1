"""Rows of a packed matrix, unpacked one by one, so that tied embedding and head share one matrix."""

from __future__ import annotations

import numpy as np
from numba import carray

from megatron_kernels.cpu import rows
from megatron_kernels.cpu.ir import compiled, pointer
from megatron_kernels.cpu.records import BFLOAT16, FLOAT32, INT4, MATRIX
from megatron_kernels.cpu.sizes import INT4_BLOCK_BYTES, INT8_BLOCK_BYTES
from megatron_kernels.cpu.sync import read

_MATRIX_TYPE = np.dtype(MATRIX)


@compiled
def _float_row(matrix, row, y):
    width = 4 if matrix.format == FLOAT32 else 2
    panel = matrix.address + (row >> 4) * matrix.inputs * 16 * width
    lane = row & 15
    for k in range(matrix.inputs):
        if matrix.format == FLOAT32:
            value = rows.get(panel + k * 64 + lane * 4)
        else:
            value = rows.get_bfloat16(panel + (k >> 1) * 64 + lane * 4 + (k & 1) * 2)
        rows.put(y + k * 4, value)


@compiled
def _integer_row(matrix, row, y):
    size = INT4_BLOCK_BYTES if matrix.format == INT4 else INT8_BLOCK_BYTES
    blocks = matrix.inputs >> 5
    lane = row & 7
    for block in range(blocks):
        at = matrix.address + ((row >> 3) * blocks + block) * size
        if matrix.format == INT4:
            scale, offset = rows.get_half(at + 128 + lane * 2), rows.get_half(at + 144 + lane * 2)
        else:
            scale, offset = rows.get_half(at + 256 + lane * 2), np.float32(0.0)
        for k in range(32):
            group, within = k >> 2, k & 3
            if matrix.format == INT4:
                value = rows.get_byte(at + (group & 3) * 32 + lane * 4 + within) >> (4 * (group >> 2)) & 15
            else:
                value = rows.get_byte(at + group * 32 + lane * 4 + within)
            rows.put(y + (block * 32 + k) * 4, np.float32(value) * scale + offset)


@compiled
def look_up(record, ids, count, y):
    """y[i] = row ids[i] of the matrix, float32. `record`: address of a MATRIX; `ids`: of int64."""
    matrix = carray(pointer(record), 1, dtype=_MATRIX_TYPE)[0]
    for i in range(count):
        row = read(ids + i * 8)
        if matrix.format in (FLOAT32, BFLOAT16):
            _float_row(matrix, row, y + i * matrix.inputs * 4)
        else:
            _integer_row(matrix, row, y + i * matrix.inputs * 4)
