"""Attention over a paged cache. Keys and values of a token are one row of a page, float32 or bfloat16."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from megatron_kernels.cpu.ir import F32, F32_V, I32, I64, LANES, Code, constant, function
from megatron_kernels.cpu.rows import load_bfloat16

_SPAN = 16
_WIDE = 64
"""Values of a token that are summed at once: enough accumulators to hide the latency of an addition."""
_FOLDS = (
    ([0, 8, 2, 10, 4, 12, 6, 14], [1, 9, 3, 11, 5, 13, 7, 15]),
    ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
    ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
)
"""Shuffle masks of the lanes of two vectors that are added, by level. Only the last level crosses halves."""
Load = Callable[[Code, ir.Value], ir.Value]

_DOTS = dict.fromkeys(("query", "keys", "stride", "tokens", "size", "scores"), I64)
_MIX = dict.fromkeys(("weights", "values", "stride", "tokens", "size", "y"), I64)
_TRANSPOSE = dict.fromkeys(("keys", "stride", "size", "y"), I64)


def _load_float32(code: Code, address: ir.Value) -> ir.Value:
    return code.load(F32_V, address)


def _dots(code: Code, a: dict[str, ir.Value], load: Load, width: int) -> None:
    """Compute eight tokens at a time, whose sums over lanes are reduced together, then the rest one by one."""
    b = code.b
    whole = b.and_(a["tokens"], constant(I64, -LANES))

    def of_eight(token: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        keys = [_key(code, a, b.add(token, constant(I64, lane))) for lane in range(LANES)]

        def products(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            query = code.load(F32_V, code.at(a["query"], i, 4))
            return [
                code.fma(query, load(code, code.at(key, i, width)), total)
                for key, total in zip(keys, sums, strict=True)
            ]

        sums = code.loop(a["size"], [constant(F32_V, 0.0)] * LANES, products, step=LANES)
        code.store(_sums(code, sums), code.at(a["scores"], token, 4))
        return []

    def of_one(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        token = b.add(whole, index)
        key = _key(code, a, token)

        def products(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            query = code.load(F32_V, code.at(a["query"], i, 4))
            return [code.fma(query, load(code, code.at(key, i, width)), sums[0])]

        (total,) = code.loop(a["size"], [constant(F32_V, 0.0)], products, step=LANES)
        code.store(code.sum(total), code.at(a["scores"], token, 4))
        return []

    code.loop(whole, [], of_eight, step=LANES)
    code.loop(b.sub(a["tokens"], whole), [], of_one)


def _key(code: Code, a: dict[str, ir.Value], token: ir.Value) -> ir.Value:
    return code.b.add(a["keys"], code.b.mul(token, a["stride"]))


def _sums(code: Code, vectors: list[ir.Value]) -> ir.Value:
    """The sum over the lanes of each of eight vectors, in their order."""
    for low, high in _FOLDS:
        folded = []
        for first, second in zip(vectors[::2], vectors[1::2], strict=True):
            halves = [
                code.b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, LANES), lanes))
                for lanes in (low, high)
            ]
            folded.append(code.b.fadd(*halves))
        vectors = folded
    return vectors[0]


@function(**_DOTS)
def float32_dots(code: Code, a: dict[str, ir.Value]) -> None:
    """scores[token] = query · keys[token]; `stride` between keys in bytes."""
    _dots(code, a, _load_float32, 4)


@function(**_DOTS)
def bfloat16_dots(code: Code, a: dict[str, ir.Value]) -> None:
    """As float32_dots."""
    _dots(code, a, load_bfloat16, 2)


def _mix(code: Code, a: dict[str, ir.Value], load: Load, width: int) -> None:
    b = code.b
    whole = b.and_(a["size"], constant(I64, -_WIDE))

    def of_span(column: ir.Value, vectors: int) -> None:
        y = code.at(a["y"], column, 4)
        values = code.at(a["values"], column, width)

        def add(token: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            weight = code.splat(code.load(F32, code.at(a["weights"], token, 4)))
            row = b.add(values, b.mul(token, a["stride"]))
            return [
                code.fma(weight, load(code, b.add(row, constant(I64, LANES * width * part))), total)
                for part, total in enumerate(sums)
            ]

        sums = code.loop(a["tokens"], [code.load(F32_V, y, 32 * part) for part in range(vectors)], add)
        for part, total in enumerate(sums):
            code.store(total, y, 32 * part)

    def wide(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        of_span(i, _WIDE // LANES)
        return []

    def narrow(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        of_span(b.add(whole, i), _SPAN // LANES)
        return []

    code.loop(whole, [], wide, step=_WIDE)
    code.loop(b.sub(a["size"], whole), [], narrow, step=_SPAN)


@function(**_MIX)
def float32_mix(code: Code, a: dict[str, ir.Value]) -> None:
    """y += sum of weights[token] · values[token]; `stride` between values in bytes."""
    _mix(code, a, _load_float32, 4)


@function(**_MIX)
def bfloat16_mix(code: Code, a: dict[str, ir.Value]) -> None:
    """As float32_mix."""
    _mix(code, a, load_bfloat16, 2)


def _transpose(code: Code, a: dict[str, ir.Value], load: Load, width: int) -> None:
    def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        y = code.at(a["y"], i, 4 * _SPAN)
        for first in range(0, _SPAN, LANES):
            keys = [_key(code, a, constant(I64, first + lane)) for lane in range(LANES)]
            columns = code.transposed([load(code, code.at(key, i, width)) for key in keys])
            for number, column in enumerate(columns):
                code.store(column, y, number * 4 * _SPAN + first * 4)
        return []

    code.loop(a["size"], [], body, step=LANES)


@function(**_TRANSPOSE)
def float32_transpose(code: Code, a: dict[str, ir.Value]) -> None:
    """y[size][16] = keys[16][size]; `stride` between keys in bytes."""
    _transpose(code, a, _load_float32, 4)


@function(**_TRANSPOSE)
def bfloat16_transpose(code: Code, a: dict[str, ir.Value]) -> None:
    """As float32_transpose."""
    _transpose(code, a, load_bfloat16, 2)
