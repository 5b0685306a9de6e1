"""Tiles of a matrix product: a few rows of activations times one panel of a packed weight.

A panel holds the weights of `PANEL[format]` outputs so that one register is one input (or four) of eight outputs:

float32   [K][16] floats
bfloat16  [K / 2][16][2], so that a shift and a mask of one register make the floats of two inputs
int4      blocks of 32 inputs of 8 outputs: 128 bytes of nibbles, 8 scales and 8 offsets in float16:
          value = nibble · scale + offset. Nibble vector j of 4: low halves are inputs 4 j … 4 j + 3 of each output,
          high halves inputs 16 + 4 j …
int8      blocks of 32 inputs of 8 outputs: 256 bytes, four inputs of each output together, and 8 scales in float16

int4 and int8 multiply activations that `quantize` rounded to 8 bits with one scale for 32 inputs. Sixteen products of
a nibble and a byte fit 16 bits (16 · 15 · 127 = 30480), so a block is summed up before it is widened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from megatron_kernels.cpu.ir import (
    F16,
    F32,
    F32_V,
    I8,
    I16,
    I32,
    I32_V,
    I64,
    LANES,
    Code,
    constant,
    define,
    function,
)
from megatron_kernels.cpu.sizes import (
    BLOCK,
    INT4_BLOCK_BYTES,
    INT8_BLOCK_BYTES,
    MOST_INT4_ROWS,
    MOST_INT8_ROWS,
    MOST_ROWS,
)

_I8_V, _I16_V = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
_HALVES = ir.VectorType(F16, LANES)
_VECTOR_BYTES = 32

_TILE = dict.fromkeys(("x", "x_stride", "panel", "panel_stride", "inputs", "y", "y_stride", "ahead"), I64) | {
    "adds": I32
}
_INTEGER_TILE = dict.fromkeys(
    ("x", "x_stride", "scales", "scales_stride", "panel", "inputs", "y", "y_stride", "ahead"), I64
) | {"adds": I32}
Accumulators = list[ir.Value]
_LINE = 64


def _finish(code: Code, a: dict[str, ir.Value], sums: Sequence[Accumulators]) -> None:
    """Store a tile, or add it to what is there."""
    b = code.b
    add, store, end = (b.append_basic_block(name) for name in ("add", "store", "end"))
    rows = [b.add(a["y"], b.mul(a["y_stride"], constant(I64, row))) for row in range(len(sums))]
    b.cbranch(b.icmp_signed("!=", a["adds"], constant(I32, 0)), add, store)
    for block, adds in ((add, True), (store, False)):
        b.position_at_end(block)
        for row, vectors in zip(rows, sums, strict=True):
            for number, vector in enumerate(vectors):
                offset = number * _VECTOR_BYTES
                code.store(b.fadd(vector, code.load(F32_V, row, offset)) if adds else vector, row, offset)
        b.branch(end)
    b.position_at_end(end)


def _zeros(rows: int, vectors: int) -> Accumulators:
    return [constant(F32_V, 0.0)] * (rows * vectors)


def _rows(values: Accumulators, rows: int) -> list[Accumulators]:
    width = len(values) // rows
    return [values[row * width : (row + 1) * width] for row in range(rows)]


def _float32(code: Code, a: dict[str, ir.Value], rows: int) -> None:
    def body(k: ir.Value, sums: Accumulators) -> Accumulators:
        weights = code.at(a["panel"], code.b.mul(k, a["panel_stride"]))
        return _multiply(code, a, rows, k, 0, [code.load(F32_V, weights, v * _VECTOR_BYTES) for v in range(2)], sums)

    _finish(code, a, _rows(code.loop(a["inputs"], _zeros(rows, 2), body), rows))


def _bfloat16(code: Code, a: dict[str, ir.Value], rows: int) -> None:
    def body(k: ir.Value, sums: Accumulators) -> Accumulators:
        b = code.b
        at = code.at(a["panel"], k, 32)
        _ask_ahead(code, a, at, 64)
        pairs = [code.load(I32_V, at, v * _VECTOR_BYTES) for v in range(2)]
        even = [b.bitcast(b.shl(pair, constant(I32_V, 16)), F32_V) for pair in pairs]
        odd = [b.bitcast(b.and_(pair, constant(I32_V, -65536)), F32_V) for pair in pairs]
        return _multiply(code, a, rows, k, 1, odd, _multiply(code, a, rows, k, 0, even, sums))

    _finish(code, a, _rows(code.loop(a["inputs"], _zeros(rows, 2), body, step=2), rows))


def _multiply(
    code: Code,
    a: dict[str, ir.Value],
    rows: int,
    k: ir.Value,
    ahead: int,
    weights: Sequence[ir.Value],
    sums: Accumulators,
) -> Accumulators:
    result = []
    for row in range(rows):
        at = code.b.add(code.at(a["x"], k, 4), code.b.mul(a["x_stride"], constant(I64, row)))
        x = code.splat(code.load(F32, at, 4 * ahead, align=4))
        result += [
            code.fma(x, weight, total)
            for weight, total in zip(weights, sums[row * len(weights) : (row + 1) * len(weights)], strict=True)
        ]
    return result


def _int4(code: Code, a: dict[str, ir.Value], rows: int) -> None:
    def body(block: ir.Value, sums: Accumulators) -> Accumulators:
        b = code.b
        at = code.at(a["panel"], block, INT4_BLOCK_BYTES)
        _ask_ahead(code, a, at, INT4_BLOCK_BYTES)
        packed = [code.load(_I8_V, at, v * _VECTOR_BYTES) for v in range(4)]
        low = [b.and_(vector, constant(_I8_V, 15)) for vector in packed]
        shifted = [b.lshr(b.bitcast(vector, _I16_V), constant(_I16_V, 4)) for vector in packed]
        weights = [*low, *(b.and_(b.bitcast(vector, _I8_V), constant(_I8_V, 15)) for vector in shifted)]
        scale = b.fpext(code.load(_HALVES, at, 128), F32_V)
        offset = b.fpext(code.load(_HALVES, at, 144), F32_V)
        result = []
        for row in range(rows):
            x = _row(code, a, "x", row, block, BLOCK)
            total = None
            for group, weight in enumerate(weights):
                bytes_ = b.bitcast(code.splat(code.load(I32, x, 4 * group)), _I8_V)
                product = code.call("llvm.x86.avx2.pmadd.ub.sw", _I16_V, weight, bytes_)
                total = product if total is None else b.add(total, product)
            wide = code.call("llvm.x86.avx2.pmadd.wd", I32_V, total, constant(_I16_V, 1))
            scales = _row(code, a, "scales", row, block, 8)
            factor = b.fmul(scale, code.splat(code.load(F32, scales)))
            sum_ = code.fma(b.sitofp(wide, F32_V), factor, sums[row])
            result.append(code.fma(offset, code.splat(code.load(F32, scales, 4)), sum_))
        return result

    _finish(code, a, _rows(code.loop(_blocks(code, a), _zeros(rows, 1), body), rows))


def _int8(code: Code, a: dict[str, ir.Value], rows: int) -> None:
    def body(block: ir.Value, sums: Accumulators) -> Accumulators:
        b = code.b
        at = code.at(a["panel"], block, INT8_BLOCK_BYTES)
        _ask_ahead(code, a, at, INT8_BLOCK_BYTES)
        scale = b.fpext(code.load(_HALVES, at, 256), F32_V)
        totals: list[ir.Value | None] = [None] * rows
        for group in range(8):
            weight = code.load(_I8_V, at, group * _VECTOR_BYTES)
            is_negative = b.icmp_signed("<", weight, constant(_I8_V, 0))
            magnitude = b.select(is_negative, b.neg(weight), weight)
            for row in range(rows):
                x = _row(code, a, "x", row, block, BLOCK)
                bytes_ = b.bitcast(code.splat(code.load(I32, x, 4 * group)), _I8_V)
                # The instruction multiplies unsigned by signed: the sign of the weight is moved to the activation.
                signed = code.call("llvm.x86.avx2.psign.b", _I8_V, bytes_, weight)
                product = code.call("llvm.x86.avx2.pmadd.ub.sw", _I16_V, magnitude, signed)
                wide = code.call("llvm.x86.avx2.pmadd.wd", I32_V, product, constant(_I16_V, 1))
                before = totals[row]
                totals[row] = wide if before is None else b.add(before, wide)
        result = []
        for row, total in enumerate(totals):
            assert total is not None
            scales = _row(code, a, "scales", row, block, 8)
            factor = b.fmul(scale, code.splat(code.load(F32, scales)))
            result.append(code.fma(b.sitofp(total, F32_V), factor, sums[row]))
        return result

    _finish(code, a, _rows(code.loop(_blocks(code, a), _zeros(rows, 1), body), rows))


def _ask_ahead(code: Code, a: dict[str, ir.Value], at: ir.Value, size: int) -> None:
    """Prefetch weights: the CPU's own prefetcher stops at the end of each page."""
    there = code.b.add(at, a["ahead"])
    for line in range(0, size, _LINE):
        code.prefetch(there, line)


def _row(code: Code, a: dict[str, ir.Value], name: str, row: int, block: ir.Value, size: int) -> ir.Value:
    start = code.b.add(a[name], code.b.mul(a[f"{name}_stride"], constant(I64, row)))
    return code.at(start, block, size)


def _blocks(code: Code, a: dict[str, ir.Value]) -> ir.Value:
    return code.b.lshr(a["inputs"], constant(I64, 5))


def _by_rows(
    code: Code,
    a: dict[str, ir.Value],
    parameters: dict[str, ir.Type],
    write: Callable[[Code, dict[str, ir.Value], int], None],
    most: int,
) -> None:
    """Call the tile that is written for this number of rows."""
    b = code.b
    arguments = [a[name] for name in parameters]
    end = b.append_basic_block("end")
    choice = b.switch(a["rows"], end)
    for rows in range(1, most + 1):
        block = b.append_basic_block(f"rows{rows}")
        choice.add_case(constant(I64, rows), block)
        b.position_at_end(block)
        name = f"{code.function.name}_{rows}"

        def body(inner: Code, values: dict[str, ir.Value], rows: int = rows) -> None:
            write(inner, values, rows)

        b.call(define(code.function.module, name, parameters, ir.VoidType(), body), arguments)
        b.branch(end)
    b.position_at_end(end)


@function(rows=I64, **_TILE)
def float32_tile(code: Code, a: dict[str, ir.Value]) -> None:
    """y[rows][16] = (y +) x[rows][inputs] · panel. Strides in bytes; `panel_stride` is that of one input.

    Nothing is prefetched: it was as fast without.
    """
    _by_rows(code, a, _TILE, _float32, MOST_ROWS)


@function(rows=I64, **_TILE)
def bfloat16_tile(code: Code, a: dict[str, ir.Value]) -> None:
    """As float32_tile, with an even number of inputs; `panel_stride` is not used."""
    _by_rows(code, a, _TILE, _bfloat16, MOST_ROWS)


@function(rows=I64, **_INTEGER_TILE)
def int4_tile(code: Code, a: dict[str, ir.Value]) -> None:
    """y[rows][8] = (y +) x[rows][inputs] · panel. `scales`: what quantize() left of 32 inputs: scale, scaled sum."""
    _by_rows(code, a, _INTEGER_TILE, _int4, MOST_INT4_ROWS)


@function(rows=I64, **_INTEGER_TILE)
def int8_tile(code: Code, a: dict[str, ir.Value]) -> None:
    """As int4_tile."""
    _by_rows(code, a, _INTEGER_TILE, _int8, MOST_INT8_ROWS)
