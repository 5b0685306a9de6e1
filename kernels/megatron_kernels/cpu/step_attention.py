"""Attention of a step: queries, keys and values are completed, the cache is filled, and threads take work items.

Compiled by numba.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from megatron_kernels.cpu import attention, rows, tiles
from megatron_kernels.cpu.ir import compiled, pointer
from megatron_kernels.cpu.records import ITEM
from megatron_kernels.cpu.sizes import MOST_ROWS, UNIT
from megatron_kernels.cpu.sync import fetch_add, read, read_int32

_ITEM_TYPE = np.dtype(ITEM)


@compiled
def append(step, layer, thread, number):
    """Normalise and rotate queries and keys of every token; write keys and values to the cache."""
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
    """Return the address of a token's keys and the number of tokens in its page from there on."""
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
                # Unwritten slots contain arbitrary values, and 0 · NaN is NaN.
                rows.fill(to, size, np.float32(0.0))
            elif step.is_bfloat16:
                rows.widen(values + token * step.row_stride, to, size)
            else:
                rows.scale(values + token * step.row_stride, to, size, np.float32(1.0))
        position += UNIT


@compiled
def _attend_many(step, number, window, item, scratch):
    """Some new tokens of a sequence, one group of heads, some query rows at a time against all visible keys."""
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
                tiles.float32_tile(some, query, query_stride, at, UNIT * 4, size, to, row_bytes, 0, 0)
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
                    some,
                    scores,
                    row_bytes,
                    values + part * 4,
                    size * 4,
                    panels * UNIT,
                    out + part * 4,
                    out_stride,
                    0,
                    0,
                )


@compiled
def attend(step, layer, thread, number, counter):
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
