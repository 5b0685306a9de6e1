"""Conversion of quantised weights in the formats of files to panels.

To floats: 32 inputs of one unit of outputs, through a square [16 outputs][32 inputs] of float32. The values equal those
of layers/quantized.py bit by bit: a product, then a sum. To integers: unchanged, eight rows of one block each.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from megatron_kernels.cpu.ir import F16, F32_V, I8, I16, I32, I32_V, I64, LANES, Code, constant, function
from megatron_kernels.cpu.rows import load_bfloat16, rounded_bfloat16
from megatron_kernels.cpu.sizes import BLOCK, UNIT

_BYTES, _NIBBLES = ir.VectorType(I8, LANES), ir.VectorType(I8, 16)
_HALVES = ir.VectorType(F16, LANES)
_PARTS = BLOCK // LANES
_SQUARE_ROW = BLOCK * 4
Decode = Callable[[Code, ir.Value], list[ir.Value]]


def _read(code: Code, a: dict[str, ir.Value], decode: Decode) -> None:
    def row(number: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        source = code.b.add(a["source"], code.b.mul(number, a["row_bytes"]))
        for part, vector in enumerate(decode(code, source)):
            code.store(vector, code.at(a["square"], number, _SQUARE_ROW), part * LANES * 4)
        return []

    code.loop(constant(I64, UNIT), [], row)


def _half(code: Code, address: ir.Value, offset: int) -> ir.Value:
    return code.splat(code.b.fpext(code.load(F16, address, offset), ir.FloatType()))


def _nibbles(code: Code, address: ir.Value, offset: int) -> list[ir.Value]:
    """Low halves are inputs 0 … 15, high halves 16 … 31."""
    b = code.b
    both = code.load(_NIBBLES, address, offset)
    result = []
    for half in (b.and_(both, constant(_NIBBLES, 15)), b.lshr(both, constant(_NIBBLES, 4))):
        for start in (0, LANES):
            lanes = ir.Constant(ir.VectorType(I32, LANES), list(range(start, start + LANES)))
            result.append(b.sitofp(b.zext(b.shuffle_vector(half, half, lanes), I32_V), F32_V))
    return result


@function(source=I64, row_bytes=I64, square=I64)
def read_q4_0(code: Code, a: dict[str, ir.Value]) -> None:
    """Sixteen rows of one block each into a square."""

    def decode(inner: Code, at: ir.Value) -> list[ir.Value]:
        scale = _half(inner, at, 0)
        return [inner.b.fmul(inner.b.fsub(v, constant(F32_V, 8.0)), scale) for v in _nibbles(inner, at, 2)]

    _read(code, a, decode)


@function(source=I64, row_bytes=I64, square=I64)
def read_q4_1(code: Code, a: dict[str, ir.Value]) -> None:
    """As read_q4_0."""

    def decode(inner: Code, at: ir.Value) -> list[ir.Value]:
        scale, offset = _half(inner, at, 0), _half(inner, at, 2)
        return [inner.b.fadd(inner.b.fmul(v, scale), offset) for v in _nibbles(inner, at, 4)]

    _read(code, a, decode)


@function(source=I64, row_bytes=I64, square=I64)
def read_q8_0(code: Code, a: dict[str, ir.Value]) -> None:
    """As read_q4_0."""

    def decode(inner: Code, at: ir.Value) -> list[ir.Value]:
        b, scale = inner.b, _half(inner, at, 0)
        numbers = [b.sext(inner.load(_BYTES, at, 2 + part * LANES), I32_V) for part in range(_PARTS)]
        return [b.fmul(b.sitofp(number, F32_V), scale) for number in numbers]

    _read(code, a, decode)


@function(source=I64, row_bytes=I64, square=I64)
def read_float32(code: Code, a: dict[str, ir.Value]) -> None:
    """As read_q4_0."""
    _read(code, a, lambda inner, at: [inner.load(F32_V, at, part * 32) for part in range(_PARTS)])


@function(source=I64, row_bytes=I64, square=I64)
def read_bfloat16(code: Code, a: dict[str, ir.Value]) -> None:
    """As read_q4_0."""

    def decode(inner: Code, at: ir.Value) -> list[ir.Value]:
        return [load_bfloat16(inner, inner.b.add(at, constant(I64, part * 16))) for part in range(_PARTS)]

    _read(code, a, decode)


@function(source=I64, row_bytes=I64, square=I64)
def read_float16(code: Code, a: dict[str, ir.Value]) -> None:
    """As read_q4_0."""

    def decode(inner: Code, at: ir.Value) -> list[ir.Value]:
        return [inner.b.fpext(inner.load(_HALVES, at, part * 16), F32_V) for part in range(_PARTS)]

    _read(code, a, decode)


def _columns(code: Code, square: ir.Value, input_: ir.Value, half: int) -> list[ir.Value]:
    """Eight inputs of eight outputs: one vector an input."""
    at = code.at(code.b.add(square, constant(I64, half * LANES * _SQUARE_ROW)), input_, 4)
    return code.transposed([code.load(F32_V, at, row * _SQUARE_ROW) for row in range(LANES)])


@function(square=I64, panel=I64)
def write_float32(code: Code, a: dict[str, ir.Value]) -> None:
    """A square into 32 inputs of a float32 panel."""

    def some(start: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        for half in range(2):
            for number, vector in enumerate(_columns(code, a["square"], start, half)):
                code.store(vector, code.at(a["panel"], start, UNIT * 4), number * UNIT * 4 + half * 32)
        return []

    code.loop(constant(I64, BLOCK), [], some, step=LANES)


@function(square=I64, panel=I64)
def write_bfloat16(code: Code, a: dict[str, ir.Value]) -> None:
    """A square into 32 inputs of a bfloat16 panel, to the nearest, halves to even."""
    b = code.b

    def some(start: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        for half in range(2):
            rounded = [rounded_bfloat16(code, vector) for vector in _columns(code, a["square"], start, half)]
            for number in range(0, LANES, 2):
                low = b.lshr(rounded[number], constant(I32_V, 16))
                pair = b.or_(low, b.and_(rounded[number + 1], constant(I32_V, -65536)))
                code.store(pair, code.at(a["panel"], start, UNIT * 2), number * UNIT * 2 + half * 32)
        return []

    code.loop(constant(I64, BLOCK), [], some, step=LANES)


def _rows(code: Code, a: dict[str, ir.Value]) -> list[ir.Value]:
    return [code.b.add(a["source"], code.b.mul(a["row_bytes"], constant(I64, row))) for row in range(LANES)]


def _gathered(code: Code, kind: ir.Type, addresses: list[ir.Value]) -> ir.Value:
    """Return one number of each row as a vector."""
    result = ir.Constant(ir.VectorType(kind, LANES), ir.Undefined)
    for lane, address in enumerate(addresses):
        result = code.b.insert_element(result, code.load(kind, address), constant(I32, lane))
    return result


def _write_words(code: Code, a: dict[str, ir.Value], rows: list[ir.Value], offset: int, words: int) -> None:
    """Words of four inputs, eight at a time: those of all rows together."""
    for start in range(0, words, LANES):
        # Loaded as floats, because they are only moved.
        loaded = [_words(code, row, offset + 4 * start, min(LANES, words - start)) for row in rows]
        for number, vector in enumerate(code.transposed(loaded)[: words - start]):
            code.store(vector, a["panel"], (start + number) * 32)


def _words(code: Code, row: ir.Value, offset: int, count: int) -> ir.Value:
    """Return eight words, or four words and four undefined lanes."""
    if count == LANES:
        return code.load(F32_V, row, offset)
    half = code.load(ir.VectorType(ir.FloatType(), count), row, offset)
    lanes = ir.Constant(ir.VectorType(I32, LANES), [*range(count), *range(LANES - count)])
    return code.b.shuffle_vector(half, half, lanes)


@function(source=I64, row_bytes=I64, panel=I64)
def int4_of_q4_1(code: Code, a: dict[str, ir.Value]) -> None:
    """Eight rows of one block each into 32 inputs of an int4 panel."""
    rows = _rows(code, a)
    _write_words(code, a, rows, 4, 4)
    both = _gathered(code, I32, rows)
    halves = ir.VectorType(I16, LANES)
    code.store(code.b.trunc(both, halves), a["panel"], 128)
    code.store(code.b.trunc(code.b.lshr(both, constant(I32_V, 16)), halves), a["panel"], 144)


@function(source=I64, row_bytes=I64, panel=I64)
def int4_of_q4_0(code: Code, a: dict[str, ir.Value]) -> None:
    """As int4_of_q4_1; a value is (nibble - 8) · scale."""
    rows = _rows(code, a)
    _write_words(code, a, rows, 2, 4)
    scales = code.b.bitcast(_gathered(code, I16, rows), _HALVES)
    offsets = code.b.fmul(code.b.fpext(scales, F32_V), constant(F32_V, -8.0))
    code.store(scales, a["panel"], 128)
    code.store(code.b.fptrunc(offsets, _HALVES), a["panel"], 144)


@function(source=I64, row_bytes=I64, panel=I64)
def int8_of_q8_0(code: Code, a: dict[str, ir.Value]) -> None:
    """Eight rows of one block each into 32 inputs of an int8 panel."""
    rows = _rows(code, a)
    _write_words(code, a, rows, 2, 8)
    code.store(_gathered(code, I16, rows), a["panel"], 256)
