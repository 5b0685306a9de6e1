"""A decoder's step, run by all threads of a thread pool. Compiled by numba; records.py defines its arguments.

Each thread computes an equal share of a product; attention work items differ in size, so threads take them from a
counter per layer. Threads meet at a barrier where one phase reads what another wrote. A row's result does not depend on
which thread computed it.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from megatron_kernels.cpu import rows
from megatron_kernels.cpu.ir import compiled, pointer
from megatron_kernels.cpu.products import ADD, NO_NORM, SET, gated_product, product, ready
from megatron_kernels.cpu.records import (
    DOWN,
    GATE_UP,
    LAYER,
    MATRICES_PER_LAYER,
    MATRIX,
    OUTPUT,
    QKV,
)
from megatron_kernels.cpu.step_attention import append, attend
from megatron_kernels.cpu.sync import barrier, read

_MATRIX_TYPE, _LAYER_TYPE = np.dtype(MATRIX), np.dtype(LAYER)


@compiled
def _add_output(step, thread, matrix, source, norm):
    """x += (norm of) source · matrix"""
    hidden, count, threads = step.hidden, step.tokens, step.threads
    x, quantized, scales = ready(step, thread, matrix, source, NO_NORM, count)
    if norm == 0:
        product(thread, threads, matrix, x, quantized, scales, count, step.x, hidden * 4, ADD)
    else:
        product(thread, threads, matrix, x, quantized, scales, count, step.added, hidden * 4, SET)
        barrier(step.barrier, step.threads)
        row = thread
        while row < count:
            at = step.added + row * hidden * 4
            rows.rms_norm(at, norm, at, hidden, np.float32(step.epsilon))
            rows.add(at, step.x + row * hidden * 4, hidden)
            row += step.threads
    barrier(step.barrier, step.threads)


@compiled
def run_step(step, thread):
    """Run all layers: x becomes the last hidden states, the cache is filled, the requested logits are written."""
    threads, count = step.threads, step.tokens
    layers = carray(pointer(step.layers), step.num_layers, dtype=_LAYER_TYPE)
    matrices = carray(pointer(step.matrices), step.num_layers * MATRICES_PER_LAYER + 1, dtype=_MATRIX_TYPE)
    for number in range(step.num_layers):
        layer = layers[number]
        first = number * MATRICES_PER_LAYER
        matrix = matrices[first + QKV]
        x, quantized, scales = ready(step, thread, matrix, step.x, layer.attention_norm, count)
        product(thread, threads, matrix, x, quantized, scales, count, step.qkv, matrix.outputs * 4, SET)
        barrier(step.barrier, threads)
        append(step, layer, thread, number)
        barrier(step.barrier, threads)
        attend(step, layer, thread, number, step.counters + number * 8)
        barrier(step.barrier, threads)
        _add_output(step, thread, matrices[first + OUTPUT], step.attended, layer.attention_output_norm)
        matrix = matrices[first + GATE_UP]
        x, quantized, scales = ready(step, thread, matrix, step.x, layer.mlp_norm, count)
        gated_product(step, thread, matrix, x, quantized, scales, count)
        barrier(step.barrier, threads)
        _add_output(step, thread, matrices[first + DOWN], step.gated, layer.mlp_output_norm)
    if step.num_logits > 0:
        _logits(step, thread, matrices[step.num_layers * MATRICES_PER_LAYER])


@compiled
def _logits(step, thread, head):
    """Compute the logits of the requested rows, which are gathered first."""
    hidden = step.hidden
    row = thread
    while row < step.num_logits:
        at = step.x + read(step.logit_rows + row * 8) * hidden * 4
        rows.scale(at, step.added + row * hidden * 4, hidden, np.float32(1.0))
        row += step.threads
    barrier(step.barrier, step.threads)
    x, quantized, scales = ready(step, thread, head, step.added, step.norm, step.num_logits)
    y_stride = head.outputs * 4
    product(thread, step.threads, head, x, quantized, scales, step.num_logits, step.logits, y_stride, SET)
