"""Packing of weights directly from a mapped file into panels."""

from __future__ import annotations

import numpy as np
from numba import carray

from megatron_kernels.cpu import blocks
from megatron_kernels.cpu.ir import compiled, pointer
from megatron_kernels.cpu.records import (
    BFLOAT16,
    FLOAT32,
    FROM_BFLOAT16,
    FROM_FLOAT16,
    FROM_Q4_0,
    FROM_Q4_1,
    FROM_Q8_0,
    MATRIX,
    PACKING,
)
from megatron_kernels.cpu.sizes import BLOCK, INT4_BLOCK_BYTES, INT8_BLOCK_BYTES, UNIT

_MATRIX_TYPE, _PACKING_TYPE = np.dtype(MATRIX), np.dtype(PACKING)


@compiled
def _read(kind, source, row_bytes, square):
    """Sixteen rows of 32 inputs; return the bytes that these take in a row."""
    if kind == FROM_Q4_1:
        blocks.read_q4_1(source, row_bytes, square)
        return 20
    if kind == FROM_Q4_0:
        blocks.read_q4_0(source, row_bytes, square)
        return 18
    if kind == FROM_Q8_0:
        blocks.read_q8_0(source, row_bytes, square)
        return 34
    if kind == FROM_BFLOAT16:
        blocks.read_bfloat16(source, row_bytes, square)
        return BLOCK * 2
    if kind == FROM_FLOAT16:
        blocks.read_float16(source, row_bytes, square)
        return BLOCK * 2
    blocks.read_float32(source, row_bytes, square)
    return BLOCK * 4


@compiled
def _pack_integers(packing, matrix, first, stop):
    """A unit is two panels of eight outputs."""
    to_each = INT8_BLOCK_BYTES if packing.kind == FROM_Q8_0 else INT4_BLOCK_BYTES
    blocks_of_row = matrix.inputs // BLOCK
    to = matrix.address + 2 * first * blocks_of_row * to_each
    for panel in range(2 * first, 2 * stop):
        source = packing.source + panel * 8 * packing.row_bytes
        for _ in range(blocks_of_row):
            if packing.kind == FROM_Q4_1:
                blocks.int4_of_q4_1(source, packing.row_bytes, to)
                source += 20
            elif packing.kind == FROM_Q4_0:
                blocks.int4_of_q4_0(source, packing.row_bytes, to)
                source += 18
            else:
                blocks.int8_of_q8_0(source, packing.row_bytes, to)
                source += 34
            to += to_each


@compiled
def pack(record, first, stop):
    """Units `first` … `stop` - 1 of a matrix. `record`: address of a PACKING."""
    packing = carray(pointer(record), 1, dtype=_PACKING_TYPE)[0]
    matrix = carray(pointer(packing.matrix), 1, dtype=_MATRIX_TYPE)[0]
    if matrix.format != FLOAT32 and matrix.format != BFLOAT16:
        _pack_integers(packing, matrix, first, stop)
        return
    width = UNIT * BLOCK * (4 if matrix.format == FLOAT32 else 2)
    to = matrix.address + first * (matrix.inputs // BLOCK) * width
    for unit in range(first, stop):
        source = packing.source + unit * UNIT * packing.row_bytes
        for _ in range(matrix.inputs // BLOCK):
            source += _read(packing.kind, source, packing.row_bytes, packing.square)
            if matrix.format == FLOAT32:
                blocks.write_float32(packing.square, to)
            else:
                blocks.write_bfloat16(packing.square, to)
            to += width
