"""Attention over a paged cache: keys and values of a token lie in one row of a page, float32 or bfloat16."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from megatron_runtime.layers.native.ir import F32, F32_V, I16, I32, I64, LANES, Code, constant, function
from megatron_runtime.layers.native.rows import load_bfloat16

_SPAN = 16
Load = Callable[[Code, ir.Value], ir.Value]

_DOTS = dict.fromkeys(("query", "keys", "stride", "tokens", "size", "scores"), I64)
_MIX = dict.fromkeys(("weights", "values", "stride", "tokens", "size", "y"), I64)
_TRANSPOSE = dict.fromkeys(("keys", "stride", "size", "y"), I64)


def _load_float32(code: Code, address: ir.Value) -> ir.Value:
    return code.load(F32_V, address)


def _dots(code: Code, a: dict[str, ir.Value], load: Load, width: int) -> None:
    def of_token(token: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        key = code.b.add(a["keys"], code.b.mul(token, a["stride"]))

        def products(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            return [
                code.fma(
                    code.load(F32_V, code.at(a["query"], i, 4), 4 * LANES * part),
                    load(code, code.at(key, code.b.add(i, constant(I64, LANES * part)), width)),
                    total,
                )
                for part, total in enumerate(sums)
            ]

        sums = code.loop(a["size"], [constant(F32_V, 0.0)] * 2, products, step=_SPAN)
        code.store(code.sum(code.b.fadd(*sums)), code.at(a["scores"], token, 4))
        return []

    code.loop(a["tokens"], [], of_token)


@function(**_DOTS)
def float32_dots(code: Code, a: dict[str, ir.Value]) -> None:
    """scores[token] = query · keys[token]; `stride` between keys in bytes."""
    _dots(code, a, _load_float32, 4)


@function(**_DOTS)
def bfloat16_dots(code: Code, a: dict[str, ir.Value]) -> None:
    """As float32_dots."""
    _dots(code, a, load_bfloat16, 2)


def _mix(code: Code, a: dict[str, ir.Value], load: Load, width: int) -> None:
    def of_span(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        y = code.at(a["y"], i, 4)
        values = code.at(a["values"], i, width)

        def add(token: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            weight = code.splat(code.load(F32, code.at(a["weights"], token, 4)))
            row = code.b.add(values, code.b.mul(token, a["stride"]))
            return [
                code.fma(weight, load(code, code.b.add(row, constant(I64, LANES * width * part))), total)
                for part, total in enumerate(sums)
            ]

        sums = code.loop(a["tokens"], [code.load(F32_V, y, 32 * part) for part in range(2)], add)
        for part, total in enumerate(sums):
            code.store(total, y, 32 * part)
        return []

    code.loop(a["size"], [], of_span, step=_SPAN)


@function(**_MIX)
def float32_mix(code: Code, a: dict[str, ir.Value]) -> None:
    """y += sum of weights[token] · values[token]; `stride` between values in bytes."""
    _mix(code, a, _load_float32, 4)


@function(**_MIX)
def bfloat16_mix(code: Code, a: dict[str, ir.Value]) -> None:
    """As float32_mix."""
    _mix(code, a, load_bfloat16, 2)


def _transpose(code: Code, a: dict[str, ir.Value], element: Callable[[Code, ir.Value], ir.Value], width: int) -> None:
    keys = [code.b.add(a["keys"], code.b.mul(a["stride"], constant(I64, token))) for token in range(_SPAN)]

    def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        y = code.at(a["y"], i, 4 * _SPAN)
        for part in range(2):
            vector: ir.Value = ir.Constant(F32_V, ir.Undefined)
            for lane in range(LANES):
                value = element(code, code.at(keys[part * LANES + lane], i, width))
                vector = code.b.insert_element(vector, value, constant(I32, lane))
            code.store(vector, y, 32 * part)
        return []

    code.loop(a["size"], [], body)


@function(**_TRANSPOSE)
def float32_transpose(code: Code, a: dict[str, ir.Value]) -> None:
    """y[size][16] = keys[16][size]; `stride` between keys in bytes."""
    _transpose(code, a, lambda inner, at: inner.load(F32, at), 4)


@function(**_TRANSPOSE)
def bfloat16_transpose(code: Code, a: dict[str, ir.Value]) -> None:
    """As float32_transpose."""

    def element(inner: Code, at: ir.Value) -> ir.Value:
        bits = inner.b.shl(inner.b.zext(inner.load(I16, at), I32), constant(I32, 16))
        return inner.b.bitcast(bits, F32)

    _transpose(code, a, element, 2)
