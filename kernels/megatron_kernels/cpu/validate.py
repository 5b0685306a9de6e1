"""Compiled validation of stored weights: the sum of all their bytes, and whether their scales are finite."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray

from megatron_kernels.cpu.ir import I32, I64, Code, compiled, constant, function, pointer
from megatron_kernels.cpu.records import VALIDATION
from megatron_kernels.cpu.sync import write

_VALIDATION_TYPE = np.dtype(VALIDATION)
_NAMES = VALIDATION.names or ()
_SUM_AT, _IS_FINITE_AT = 8 * _NAMES.index("sum"), 8 * _NAMES.index("is_finite")
_WORDS = ir.VectorType(I64, 4)
_EACH = 16
"""Words of one iteration: four independent sums hide the latency of an addition."""
_TOP_BITS = -0x7FFF8000
"""Bits of two float16 numbers that a carry sets when one is added to an exponent of all ones."""
_ONE = 0x04000400


@function(I64, address=I64, count=I64)
def sum_of_words(code: Code, a: dict[str, ir.Value]) -> ir.Value:
    """Return the sum of `count` words of eight bytes, modulo 2^64."""
    b = code.b
    whole = b.and_(a["count"], constant(I64, -_EACH))

    def vectors(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        at = code.at(a["address"], index, 8)
        return [b.add(total, code.load(_WORDS, at, number * 32)) for number, total in enumerate(sums)]

    sums = code.loop(whole, [constant(_WORDS, 0)] * 4, vectors, step=_EACH)
    total = b.add(b.add(sums[0], sums[1]), b.add(sums[2], sums[3]))
    first = constant(I64, 0)
    for lane in range(4):
        first = b.add(first, b.extract_element(total, constant(I32, lane)))
    rest = code.at(a["address"], whole, 8)

    def single(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        return [b.add(sums[0], code.load(I64, code.at(rest, index, 8)))]

    return code.loop(b.sub(a["count"], whole), [first], single)[0]


@function(I32, address=I64, count=I64, stride=I64, mask=I64)
def full_exponents(code: Code, a: dict[str, ir.Value]) -> ir.Value:
    """Return 0 unless an exponent in the bits of `mask`, in four bytes at each stride, has all its bits set."""
    b = code.b
    mask = b.trunc(a["mask"], I32)

    def each(index: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
        bits = code.load(I32, b.add(a["address"], b.mul(index, a["stride"])))
        return [b.or_(found[0], b.add(b.and_(bits, mask), constant(I32, _ONE)))]

    return b.and_(code.loop(a["count"], [constant(I32, 0)], each)[0], constant(I32, _TOP_BITS))


@compiled
def validate(record):
    """`record`: address of a VALIDATION, whose last two words are written."""
    given = carray(pointer(record), 1, dtype=_VALIDATION_TYPE)[0]
    write(record + _SUM_AT, sum_of_words(given.address, given.num_words))
    is_finite = 1
    if given.scales != 0 and full_exponents(given.scales, given.num_blocks, given.block_bytes, given.mask) != 0:
        is_finite = 0
    write(record + _IS_FINITE_AT, is_finite)
