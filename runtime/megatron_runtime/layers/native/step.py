"""A decoder's step, run by all threads of a team side by side. Compiled by numba; what it is told is in records.py.

Threads draw tickets for pieces of work, so that one which the system holds up does not hold up the others' work, and
meet at a barrier where one phase reads what another wrote. A row's result does not depend on which thread made it.
Each phase draws from a counter of its own.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from megatron_runtime.layers.native import attention, rows, tiles
from megatron_runtime.layers.native.ir import compiled, pointer
from megatron_runtime.layers.native.records import (
    BFLOAT16,
    DOWN,
    FLOAT32,
    GATE_UP,
    GELU_TANH,
    INT4,
    ITEM,
    LAYER,
    MATRICES_PER_LAYER,
    MATRIX,
    OUTPUT,
    QKV,
)
from megatron_runtime.layers.native.sizes import (
    INT4_BLOCK_BYTES,
    INT8_BLOCK_BYTES,
    MOST_INTEGER_ROWS,
    MOST_ROWS,
    PHASES_PER_LAYER,
    PIECES,
    PRIVATE_ROWS,
    UNIT,
    block_rows,
)
from megatron_runtime.layers.native.sync import barrier, fetch_add, read, read_int32

# Plain numbers would be constants of the type, and each function that gets one compiled once more.
_SET, _ADD = np.int64(0), np.int64(1)
_FIRST, _EACH = np.int64(0), np.int64(1)
_NO_NORM = np.int64(0)
_TILE_STRIDE = np.int64(UNIT * 4)
_block_rows = compiled(block_rows)
_MATRIX_TYPE, _LAYER_TYPE, _ITEM_TYPE = np.dtype(MATRIX), np.dtype(LAYER), np.dtype(ITEM)


@compiled
def _product_unit(matrix, unit, inputs, x, x_stride, quantized, scales, count, y, y_stride, adds):
    """y[count][16] = (y +) rows · one unit of the matrix."""
    form = matrix.format
    row = 0
    if form in (FLOAT32, BFLOAT16):
        most = MOST_ROWS
        panel = matrix.address + unit * inputs * (64 if form == FLOAT32 else 32)
    else:
        most = MOST_INTEGER_ROWS
        size = INT4_BLOCK_BYTES if form == INT4 else INT8_BLOCK_BYTES
        size = (inputs >> 5) * size
        panel = matrix.address + 2 * unit * size
    groups = (count + most - 1) // most
    scales_stride = (inputs >> 5) * 8
    while groups > 0:
        some = (count - row + groups - 1) // groups
        at = y + row * y_stride
        if form == FLOAT32:
            tiles.float32_tile(some, x + row * x_stride, x_stride, panel, 64, inputs, at, y_stride, adds)
        elif form == BFLOAT16:
            tiles.bfloat16_tile(some, x + row * x_stride, x_stride, panel, 64, inputs, at, y_stride, adds)
        else:
            q, s = quantized + row * inputs, scales + row * scales_stride
            for half in range(2):
                part, to = panel + half * size, at + half * 32
                if form == INT4:
                    tiles.int4_tile(some, q, inputs, s, scales_stride, part, inputs, to, y_stride, adds)
                else:
                    tiles.int8_tile(some, q, inputs, s, scales_stride, part, inputs, to, y_stride, adds)
        row += some
        groups -= 1


@compiled
def _prepare(form, source, norm, epsilon, inputs, first, step_by, count, into, width, capacity):
    """Norm rows `first`, `first + step_by`, … of `source` and quantise them where the format asks for it."""
    quantized = into + capacity * width * 4
    scales = quantized + capacity * width
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
def _inputs(step, thread, count):
    """(where the prepared inputs of a product are, rows there is room for)"""
    if count <= PRIVATE_ROWS:
        return step.thread_inputs + thread * step.thread_inputs_stride, PRIVATE_ROWS
    return step.shared_inputs, count


@compiled
def _ready(step, thread, matrix, source, norm, count):
    """Prepare the inputs of a product; return (x, quantised, scales)."""
    into, capacity = _inputs(step, thread, count)
    inputs = matrix.inputs
    epsilon = np.float32(step.epsilon)
    is_integer = matrix.format not in (FLOAT32, BFLOAT16)
    if count <= PRIVATE_ROWS:
        _prepare(matrix.format, source, norm, epsilon, inputs, _FIRST, _EACH, count, into, step.width, capacity)
    elif norm != 0 or is_integer:
        _prepare(matrix.format, source, norm, epsilon, inputs, thread, step.threads, count, into, step.width, capacity)
        barrier(step.barrier, step.threads)
    quantized = into + capacity * step.width * 4
    return (into if norm != 0 else source), quantized, quantized + capacity * step.width


@compiled
def _product(threads, counter, matrix, x, quantized, scales, count, y, y_stride, adds):
    """y[count][outputs] = (y +) x · matrix, the pieces that this thread draws."""
    inputs = matrix.inputs
    units = matrix.outputs // UNIT
    piece = max(1, units // (threads * PIECES))
    block = _block_rows(matrix.format, inputs)
    while True:
        start = fetch_add(counter, piece)
        if start >= units:
            return
        stop = min(units, start + piece)
        row = 0
        while row < count:
            some = min(block, count - row)
            for unit in range(start, stop):
                _product_unit(
                    matrix,
                    unit,
                    inputs,
                    x + row * inputs * 4,
                    inputs * 4,
                    quantized + row * inputs,
                    scales + row * (inputs >> 5) * 8,
                    some,
                    y + row * y_stride + unit * 64,
                    y_stride,
                    adds,
                )
            row += block


@compiled
def _gated_product(step, thread, counter, matrix, x, quantized, scales, count):
    """gated = activation(x · gate) · (x · up)"""
    inputs, width = matrix.inputs, step.feed_forward
    units = width // UNIT
    piece = max(1, units // (step.threads * PIECES))
    block = _block_rows(matrix.format, inputs)
    gate = step.scratch + thread * step.scratch_stride
    up = gate + block * 64
    while True:
        start = fetch_add(counter, piece)
        if start >= units:
            return
        row = 0
        while row < count:
            some = min(block, count - row)
            at_x, at_q = x + row * inputs * 4, quantized + row * inputs
            at_s = scales + row * (inputs >> 5) * 8
            for unit in range(start, min(units, start + piece)):
                _product_unit(matrix, unit, inputs, at_x, inputs * 4, at_q, at_s, some, gate, _TILE_STRIDE, _SET)
                _product_unit(matrix, unit + units, inputs, at_x, inputs * 4, at_q, at_s, some, up, _TILE_STRIDE, _SET)
                for i in range(some):
                    y = step.gated + (row + i) * width * 4 + unit * 64
                    if step.activation == GELU_TANH:
                        rows.gelu_product(gate + i * 64, up + i * 64, y, UNIT)
                    else:
                        rows.silu_product(gate + i * 64, up + i * 64, y, UNIT)
            row += block


@compiled
def _append(step, layer, thread, number):
    """Finish queries and keys of every token; write keys and values to the cache."""
    size, heads, kv_heads = step.head_dim, step.heads, step.kv_heads
    stride = (heads + 2 * kv_heads) * size * 4
    cos, sin = (step.local_cos, step.local_sin) if layer.is_local else (step.cos, step.sin)
    epsilon = np.float32(step.epsilon)
    token = thread
    while token < step.tokens:
        qkv = step.qkv + token * stride
        if layer.qkv_bias != 0:
            rows.add(layer.qkv_bias, qkv, stride // 4)
        turn = read(step.positions + token * 8) * (size // 2) * 4
        for head in range(heads + kv_heads):
            at = qkv + head * size * 4
            if layer.q_norm != 0:
                rows.rms_norm(at, layer.q_norm if head < heads else layer.k_norm, at, size, epsilon)
            rows.rotate(at, cos + turn, sin + turn, size // 2)
        rows.scale(qkv, qkv, heads * size, np.float32(step.scale))
        kv = qkv + heads * size * 4
        to = step.cache + number * step.layer_stride + read(step.slots + token * 8) * step.row_stride
        if step.is_bfloat16:
            rows.narrow(kv, to, 2 * kv_heads * size)
        else:
            rows.scale(kv, to, 2 * kv_heads * size, np.float32(1.0))
        token += step.threads


@compiled
def _cache_row(step, number, sequence, position):
    """Address of a token's keys, and how many tokens lie in its page from there on."""
    page = position // step.page_size
    offset = position - page * step.page_size
    table = step.block_tables + sequence * step.block_table_stride
    row = np.int64(read_int32(table + page * 4)) * step.page_size + offset
    return step.cache + number * step.layer_stride + row * step.row_stride, step.page_size - offset


@compiled
def _attend_one(step, number, begin, item, scratch):
    """One new token of a sequence, one group of heads."""
    size, group = step.head_dim, step.heads // step.kv_heads
    length = read(step.sequence_lengths + item.sequence * 8)
    token = read(step.sequence_starts + item.sequence * 8)
    query = step.qkv + token * (step.heads + 2 * step.kv_heads) * size * 4 + item.kv_head * group * size * 4
    out = step.attended + token * step.heads * size * 4 + item.kv_head * group * size * 4
    width = 2 if step.is_bfloat16 else 4
    row_bytes = step.context * 4
    to_values = step.kv_heads * size * width
    position = begin
    while position < length:
        keys, room = _cache_row(step, number, item.sequence, position)
        keys += item.kv_head * size * width
        some = min(room, length - position)
        for head in range(group):
            scores = scratch + head * row_bytes + (position - begin) * 4
            if step.is_bfloat16:
                attention.bfloat16_dots(query + head * size * 4, keys, step.row_stride, some, size, scores)
            else:
                attention.float32_dots(query + head * size * 4, keys, step.row_stride, some, size, scores)
        position += some
    seen = length - begin
    totals = scratch + group * row_bytes
    for head in range(group):
        scores = scratch + head * row_bytes
        rows.fill(scores + seen * 4, -seen % 8, np.float32(-np.inf))
        rows.put(totals + head * 4, np.float32(1.0) / rows.exponentials(scores, (seen + 7) // 8 * 8))
        rows.fill(out + head * size * 4, size, np.float32(0.0))
    position = begin
    while position < length:
        keys, room = _cache_row(step, number, item.sequence, position)
        values = keys + item.kv_head * size * width + to_values
        some = min(room, length - position)
        for head in range(group):
            weights = scratch + head * row_bytes + (position - begin) * 4
            if step.is_bfloat16:
                attention.bfloat16_mix(weights, values, step.row_stride, some, size, out + head * size * 4)
            else:
                attention.float32_mix(weights, values, step.row_stride, some, size, out + head * size * 4)
        position += some
    for head in range(group):
        at = out + head * size * 4
        rows.scale(at, at, size, rows.get(totals + head * 4))


@compiled
def _gather(step, number, item, begin, end, keys_to, values_to):
    """Keys as panels of 16 tokens, values row by row, float32, of tokens begin … end - 1; a page holds whole panels."""
    size = step.head_dim
    width = 2 if step.is_bfloat16 else 4
    position = begin
    while position < end:
        keys, _ = _cache_row(step, number, item.sequence, position)
        keys += item.kv_head * size * width
        values = keys + step.kv_heads * size * width
        to = keys_to + (position - begin) * size * 4
        if step.is_bfloat16:
            attention.bfloat16_transpose(keys, step.row_stride, size, to)
        else:
            attention.float32_transpose(keys, step.row_stride, size, to)
        for token in range(UNIT):
            to = values_to + (position - begin + token) * size * 4
            if position + token >= end:
                # Not yet written: anything may be there, and nothing times a number that is none is none.
                rows.fill(to, size, np.float32(0.0))
            elif step.is_bfloat16:
                rows.widen(values + token * step.row_stride, to, size)
            else:
                rows.scale(values + token * step.row_stride, to, size, np.float32(1.0))
        position += UNIT


@compiled
def _attend_many(step, number, window, item, scratch):
    """Some new tokens of a sequence, one group of heads, some rows of queries at a time against all they see."""
    size, group = step.head_dim, step.heads // step.kv_heads
    count = read(step.sequence_counts + item.sequence * 8)
    cached = read(step.sequence_lengths + item.sequence * 8) - count
    token = read(step.sequence_starts + item.sequence * 8) + item.first
    first = cached + item.first
    begin = max(0, first - window + 1) // UNIT * UNIT
    end = first + item.count
    row_bytes = step.context * 4
    scores = scratch
    keys = scratch + (MOST_ROWS + 1) * row_bytes
    values = keys + row_bytes * size
    _gather(step, number, item, begin, end, keys, values)
    query_stride = (step.heads + 2 * step.kv_heads) * size * 4
    out_stride = step.heads * size * 4
    for start in range(0, item.count, MOST_ROWS):
        some = min(MOST_ROWS, item.count - start)
        seen = first + start + some - begin
        panels = (seen + UNIT - 1) // UNIT
        for head in range(group):
            column = (item.kv_head * group + head) * size * 4
            query = step.qkv + (token + start) * query_stride + column
            out = step.attended + (token + start) * out_stride + column
            for panel in range(panels):
                at, to = keys + panel * UNIT * size * 4, scores + panel * UNIT * 4
                tiles.float32_tile(some, query, query_stride, at, UNIT * 4, size, to, row_bytes, 0)
            for row in range(some):
                at = scores + row * row_bytes
                last = first + start + row + 1 - begin
                hidden = max(0, last - window)
                rows.fill(at, hidden, np.float32(-np.inf))
                rows.fill(at + last * 4, panels * UNIT - last, np.float32(-np.inf))
                total = rows.exponentials(at, panels * UNIT)
                rows.scale(at, at, panels * UNIT, np.float32(1.0) / total)
            for part in range(0, size, UNIT):
                tiles.float32_tile(
                    some, scores, row_bytes, values + part * 4, size * 4, panels * UNIT, out + part * 4, out_stride, 0
                )


@compiled
def _attend(step, layer, thread, number, counter):
    window = step.window if layer.is_local else np.int64(1) << 40
    items = carray(pointer(step.items), step.num_items, dtype=_ITEM_TYPE)
    scratch = step.scratch + thread * step.scratch_stride
    while True:
        ticket = fetch_add(counter, 1)
        if ticket >= step.num_items:
            return
        item = items[ticket]
        if read(step.sequence_counts + item.sequence * 8) == 1:
            length = read(step.sequence_lengths + item.sequence * 8)
            _attend_one(step, number, max(0, length - window), item, scratch)
        else:
            _attend_many(step, number, window, item, scratch)


@compiled
def _add_output(step, thread, matrix, source, norm, counter):
    """x += (norm of) source · matrix"""
    hidden, count = step.hidden, step.tokens
    x, quantized, scales = _ready(step, thread, matrix, source, _NO_NORM, count)
    if norm == 0:
        _product(step.threads, counter, matrix, x, quantized, scales, count, step.x, hidden * 4, _ADD)
    else:
        _product(step.threads, counter, matrix, x, quantized, scales, count, step.added, hidden * 4, _SET)
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
    """x becomes the last hidden states; logits of the rows asked for, the cache filled."""
    threads, count = step.threads, step.tokens
    layers = carray(pointer(step.layers), step.num_layers, dtype=_LAYER_TYPE)
    matrices = carray(pointer(step.matrices), step.num_layers * MATRICES_PER_LAYER + 1, dtype=_MATRIX_TYPE)
    counter = step.counters
    for number in range(step.num_layers):
        layer = layers[number]
        first = number * MATRICES_PER_LAYER
        matrix = matrices[first + QKV]
        x, quantized, scales = _ready(step, thread, matrix, step.x, layer.attention_norm, count)
        _product(threads, counter, matrix, x, quantized, scales, count, step.qkv, matrix.outputs * 4, _SET)
        barrier(step.barrier, threads)
        _append(step, layer, thread, number)
        barrier(step.barrier, threads)
        _attend(step, layer, thread, number, counter + 8)
        barrier(step.barrier, threads)
        _add_output(step, thread, matrices[first + OUTPUT], step.attended, layer.attention_output_norm, counter + 16)
        matrix = matrices[first + GATE_UP]
        x, quantized, scales = _ready(step, thread, matrix, step.x, layer.mlp_norm, count)
        _gated_product(step, thread, counter + 24, matrix, x, quantized, scales, count)
        barrier(step.barrier, threads)
        _add_output(step, thread, matrices[first + DOWN], step.gated, layer.mlp_output_norm, counter + 32)
        counter += PHASES_PER_LAYER * 8
    if step.num_logits > 0:
        _logits(step, thread, matrices[step.num_layers * MATRICES_PER_LAYER], counter)


@compiled
def _logits(step, thread, head, counter):
    """Of the rows asked for, which are gathered first."""
    hidden = step.hidden
    row = thread
    while row < step.num_logits:
        at = step.x + read(step.logit_rows + row * 8) * hidden * 4
        rows.scale(at, step.added + row * hidden * 4, hidden, np.float32(1.0))
        row += step.threads
    barrier(step.barrier, step.threads)
    x, quantized, scales = _ready(step, thread, head, step.added, step.norm, step.num_logits)
    _product(step.threads, counter, head, x, quantized, scales, step.num_logits, step.logits, head.outputs * 4, _SET)


@compiled
def run_product(job, thread):
    """y[tokens][outputs] = x[tokens][inputs] · matrix"""
    matrix = carray(pointer(job.matrix), 1, dtype=_MATRIX_TYPE)[0]
    count, inputs = job.tokens, matrix.inputs
    into = job.shared_inputs
    if matrix.format not in (FLOAT32, BFLOAT16):
        epsilon = np.float32(0.0)
        _prepare(matrix.format, job.x, _NO_NORM, epsilon, inputs, thread, job.threads, count, into, job.width, count)
        barrier(job.barrier, job.threads)
    quantized = into + count * job.width * 4
    scales = quantized + count * job.width
    _product(job.threads, job.counters, matrix, job.x, quantized, scales, count, job.y, matrix.outputs * 4, _SET)
