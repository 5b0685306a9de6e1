"""Matrix products of a step: the inputs are prepared, then each thread computes an equal range of outputs.

A row's result does not depend on which thread computed it, nor on the rows beside it. Compiled by numba.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from megatron_kernels.cpu import rows, tiles
from megatron_kernels.cpu.ir import compiled, pointer
from megatron_kernels.cpu.records import BFLOAT16, FLOAT32, GELU_TANH, INT4, MATRIX
from megatron_kernels.cpu.sizes import (
    INT4_BLOCK_BYTES,
    INT8_BLOCK_BYTES,
    UNIT,
    block_rows,
)
from megatron_kernels.cpu.sync import barrier

# Python integers would be compile-time constants and would compile each function again for every value.
SET, ADD = np.int64(0), np.int64(1)
NO_NORM = np.int64(0)
_TILE_STRIDE = np.int64(UNIT * 4)
_block_rows = compiled(block_rows)
_MATRIX_TYPE = np.dtype(MATRIX)


@compiled
def _product_unit(matrix, unit, inputs, x, x_stride, quantized, scales, count, y, y_stride, adds):
    """y[count][16] = (y +) rows · one unit of the matrix."""
    form = matrix.format
    row = 0
    if form in (FLOAT32, BFLOAT16):
        panel = matrix.address + unit * inputs * (64 if form == FLOAT32 else 32)
    else:
        size = INT4_BLOCK_BYTES if form == INT4 else INT8_BLOCK_BYTES
        size = (inputs >> 5) * size
        panel = matrix.address + 2 * unit * size
    groups = (count + matrix.rows - 1) // matrix.rows
    scales_stride = (inputs >> 5) * 8
    while groups > 0:
        some = (count - row + groups - 1) // groups
        at = y + row * y_stride
        if form == FLOAT32:
            tiles.float32_tile(some, x + row * x_stride, x_stride, panel, 64, inputs, at, y_stride, matrix.ahead, adds)
        elif form == BFLOAT16:
            tiles.bfloat16_tile(some, x + row * x_stride, x_stride, panel, 64, inputs, at, y_stride, matrix.ahead, adds)
        else:
            q, s = quantized + row * inputs, scales + row * scales_stride
            for half in range(2):
                part, to = panel + half * size, at + half * 32
                if form == INT4:
                    tiles.int4_tile(some, q, inputs, s, scales_stride, part, inputs, to, y_stride, matrix.ahead, adds)
                else:
                    tiles.int8_tile(some, q, inputs, s, scales_stride, part, inputs, to, y_stride, matrix.ahead, adds)
        row += some
        groups -= 1


@compiled
def _prepare(form, source, norm, epsilon, inputs, first, step_by, count, into, width):
    """Norm rows `first`, `first + step_by`, … of `source` and quantise them where the format asks for it."""
    quantized = into + count * width * 4
    scales = quantized + count * width
    row = first
    while row < count:
        x = source + row * inputs * 4
        if norm != 0:
            y = into + row * inputs * 4
            rows.rms_norm(x, norm, y, inputs, epsilon)
            x = y
        if form != FLOAT32 and form != BFLOAT16:
            rows.quantize(x, quantized + row * inputs, scales + row * (inputs >> 5) * 8, inputs)
        row += step_by


@compiled
def ready(step, thread, matrix, source, norm, count):
    """Prepare the inputs of a product; return (x, quantised, scales)."""
    into, inputs = step.shared_inputs, matrix.inputs
    if norm != 0 or matrix.format not in (FLOAT32, BFLOAT16):
        epsilon = np.float32(step.epsilon)
        _prepare(matrix.format, source, norm, epsilon, inputs, thread, step.threads, count, into, step.width)
        barrier(step.barrier, step.threads)
    quantized = into + count * step.width * 4
    return (into if norm != 0 else source), quantized, quantized + count * step.width


@compiled
def _range(units, thread, threads):
    """The units that a thread computes: (first, end)"""
    return units * thread // threads, units * (thread + 1) // threads


@compiled
def product(thread, threads, matrix, x, quantized, scales, count, y, y_stride, adds):
    """y[count][outputs] = (y +) x · matrix, the outputs of this thread."""
    inputs = matrix.inputs
    start, stop = _range(matrix.outputs // UNIT, thread, threads)
    block = _block_rows(matrix.format, inputs)
    row = 0
    while row < count:
        some = min(block, count - row)
        at_x, at_q = x + row * inputs * 4, quantized + row * inputs
        at_s, at_y = scales + row * (inputs >> 5) * 8, y + row * y_stride
        for unit in range(start, stop):
            _product_unit(matrix, unit, inputs, at_x, inputs * 4, at_q, at_s, some, at_y + unit * 64, y_stride, adds)
        row += block


@compiled
def gated_product(step, thread, matrix, x, quantized, scales, count):
    """gated = activation(x · gate) · (x · up), the outputs of this thread."""
    inputs, width = matrix.inputs, step.feed_forward
    units = width // UNIT
    start, stop = _range(units, thread, step.threads)
    block = _block_rows(matrix.format, inputs)
    gate = step.scratch + thread * step.scratch_stride
    up = gate + block * 64
    row = 0
    while row < count:
        some = min(block, count - row)
        at_x, at_q = x + row * inputs * 4, quantized + row * inputs
        at_s = scales + row * (inputs >> 5) * 8
        for unit in range(start, stop):
            _product_unit(matrix, unit, inputs, at_x, inputs * 4, at_q, at_s, some, gate, _TILE_STRIDE, SET)
            _product_unit(matrix, unit + units, inputs, at_x, inputs * 4, at_q, at_s, some, up, _TILE_STRIDE, SET)
            for i in range(some):
                y = step.gated + (row + i) * width * 4 + unit * 64
                if step.activation == GELU_TANH:
                    rows.gelu_product(gate + i * 64, up + i * 64, y, UNIT)
                else:
                    rows.silu_product(gate + i * 64, up + i * 64, y, UNIT)
        row += block


@compiled
def run_product(job, thread):
    """y[tokens][outputs] = x[tokens][inputs] · matrix"""
    matrix = carray(pointer(job.matrix), 1, dtype=_MATRIX_TYPE)[0]
    count, inputs = job.tokens, matrix.inputs
    into = job.shared_inputs
    if matrix.format not in (FLOAT32, BFLOAT16):
        epsilon = np.float32(0.0)
        _prepare(matrix.format, job.x, NO_NORM, epsilon, inputs, thread, job.threads, count, into, job.width)
        barrier(job.barrier, job.threads)
    quantized = into + count * job.width * 4
    scales = quantized + count * job.width
    y_stride = matrix.outputs * 4
    product(thread, job.threads, matrix, job.x, quantized, scales, count, job.y, y_stride, SET)
