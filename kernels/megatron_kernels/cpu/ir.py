"""Functions on vectors, written as LLVM IR and called from numba.

Addresses are 64-bit integers. A function takes and returns scalars only, is defined once per module, and is not
inlined, so that it has all registers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LANES = 8
"""Floats of one vector: AVX2 has 256 bits, and every wider machine has AVX2."""

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
F32_V, I32_V = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

_EXCHANGES = (
    (1, [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]),
    (2, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
    (4, [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
)
"""Shuffle masks for vectors at this distance, for transposing a square."""
_EXCHANGED = (0, 2, 1, 3, 4, 6, 5, 7)
"""Order of the square's columns after the shuffles."""

_NUMBA_TYPES = {I32: types.int32, I64: types.int64, F32: types.float32}

compiled = njit(nogil=True, error_model="numpy")
"""Decorator of numba code that calls the functions below and raises nothing."""

Body = Callable[["Code", dict[str, ir.Value]], ir.Value | None]


def constant(kind: ir.Type, value: float) -> ir.Constant:
    """`value` as a scalar, or in every lane."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [value] * kind.count)
    return ir.Constant(kind, value)


class Code:
    """Writes the body of one function."""

    def __init__(self, function: ir.Function) -> None:
        self.function = function
        self.b = ir.IRBuilder(function.append_basic_block("entry"))

    def load(self, kind: ir.Type, address: ir.Value, offset: int = 0, *, align: int = 1) -> ir.Value:
        return self.b.load(self._pointer(kind, address, offset), align=align, typ=kind)

    def store(self, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
        self.b.store(value, self._pointer(value.type, address, offset), align=1)

    def at(self, address: ir.Value, offset: ir.Value, scale: int = 1) -> ir.Value:
        """address + offset · scale"""
        return self.b.add(address, self.b.mul(offset, constant(I64, scale)) if scale != 1 else offset)

    def splat(self, value: ir.Value, lanes: int = LANES) -> ir.Value:
        undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
        first = self.b.insert_element(undefined, value, constant(I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        """An intrinsic of LLVM."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        known = self.function.module.globals.get(name)
        return self.b.call(known or ir.Function(self.function.module, kind, name), arguments)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a · b + c"""
        return self.call(f"llvm.fma.v{LANES}f32", F32_V, a, b, c)

    def sum(self, vector: ir.Value) -> ir.Value:
        """Of all lanes, halves first."""
        b, lanes = self.b, vector.type.count
        while lanes > 1:
            lanes //= 2
            low = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
            high = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes, 2 * lanes)))
            halves = [b.shuffle_vector(vector, vector, mask) for mask in (low, high)]
            vector = b.fadd(*halves) if vector.type.element == F32 else b.add(*halves)
        return b.extract_element(vector, constant(I32, 0))

    def max(self, a: ir.Value, b: ir.Value) -> ir.Value:
        suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
        return self.call(f"llvm.maxnum.{suffix}", a.type, a, b)

    def largest(self, vector: ir.Value) -> ir.Value:
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            low = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
            high = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes, 2 * lanes)))
            vector = self.max(*(self.b.shuffle_vector(vector, vector, mask) for mask in (low, high)))
        return self.b.extract_element(vector, constant(I32, 0))

    def transposed(self, rows: Sequence[ir.Value]) -> list[ir.Value]:
        """The columns of eight vectors of floats."""
        vectors = list(rows)
        kind = ir.VectorType(I32, LANES)
        for apart, *lanes in _EXCHANGES:
            for i in range(LANES):
                if not i & apart:
                    pair = vectors[i], vectors[i + apart]
                    for to, mask in zip((i, i + apart), lanes, strict=True):
                        vectors[to] = self.b.shuffle_vector(*pair, ir.Constant(kind, mask))
        return [vectors[i] for i in _EXCHANGED]

    def prefetch(self, address: ir.Value, offset: int) -> None:
        """Prefetch the cache line at an address, which need not be valid."""
        pointer = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        module = self.function.module
        known = module.globals.get("llvm.prefetch.p0i8") or ir.Function(module, kind, "llvm.prefetch.p0i8")
        # Arguments: read access, high locality, data cache.
        self.b.call(known, [self._pointer(I8, address, offset), *(constant(I32, value) for value in (0, 3, 1))])

    def loop(
        self,
        count: ir.Value,
        initial: Sequence[ir.Value],
        body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
        *,
        step: int = 1,
    ) -> list[ir.Value]:
        """for i in range(0, count, step): values = body(i, values). Returns the last values."""
        b = self.b
        before = b.block
        head = b.append_basic_block("loop")
        inside = b.append_basic_block("body")
        after = b.append_basic_block("after")
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        values = [b.phi(value.type) for value in initial]
        b.cbranch(b.icmp_signed("<", index, count), inside, after)
        b.position_at_end(inside)
        results = body(index, list(values))
        following = b.add(index, constant(I64, step))
        end = b.block
        b.branch(head)
        index.add_incoming(constant(I64, 0), before)
        index.add_incoming(following, end)
        for value, first, result in zip(values, initial, results, strict=True):
            value.add_incoming(first, before)
            value.add_incoming(result, end)
        b.position_at_end(after)
        return list(values)

    def exp(self, x: ir.Value) -> ir.Value:
        """e^x of every lane to about one unit in the last place; 0 is e^-87.3.

        Cody and Waite's reduction to |r| <= ln(2) / 2, then the Taylor polynomial of degree 7.
        """
        b = self.b
        suffix = f"v{LANES}f32"
        x = self.max(x, constant(F32_V, -87.3))
        x = self.call(f"llvm.minnum.{suffix}", F32_V, x, constant(F32_V, 88.0))
        n = self.call(f"llvm.rint.{suffix}", F32_V, b.fmul(x, constant(F32_V, 1.4426950408889634)))
        r = self.fma(n, constant(F32_V, -0.693359375), x)
        r = self.fma(n, constant(F32_V, 2.12194440e-4), r)
        result = constant(F32_V, 1 / 5040)
        for divisor in (720, 120, 24, 6, 2, 1, 1):
            result = self.fma(result, r, constant(F32_V, 1 / divisor))
        power = b.shl(b.add(b.fptosi(n, I32_V), constant(I32_V, 127)), constant(I32_V, 23))
        return b.fmul(result, b.bitcast(power, F32_V))

    def _pointer(self, kind: ir.Type, address: ir.Value, offset: int) -> ir.Value:
        at = self.b.add(address, constant(I64, offset)) if offset else address
        return self.b.inttoptr(at, kind.as_pointer())


def define(module: ir.Module, name: str, parameters: dict[str, ir.Type], result: ir.Type, body: Body) -> ir.Function:
    """The function `name` of `module`, written on the first call."""
    known = module.globals.get(name)
    if known is not None:
        return known
    function = ir.Function(module, ir.FunctionType(result, list(parameters.values())), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    code = Code(function)
    value = body(code, dict(zip(parameters, function.args, strict=True)))
    if value is None:
        code.b.ret_void()
    else:
        code.b.ret(value)
    return function


def function(result: ir.Type | None = None, **parameters: ir.Type) -> Callable[[Body], Any]:
    """Make the decorated body a function that numba code calls with its parameters, by position."""

    def wrap(body: Body) -> Any:
        name = f"megatron_{body.__name__}"
        returned = _NUMBA_TYPES[result] if result is not None else types.void
        signature = returned(*(_NUMBA_TYPES[kind] for kind in parameters.values()))

        def codegen(context: Any, builder: ir.IRBuilder, _: Any, arguments: Sequence[ir.Value]) -> ir.Value:
            called = define(builder.module, name, parameters, result or ir.VoidType(), body)
            value = builder.call(called, arguments)
            return value if result is not None else context.get_dummy_value()

        return _intrinsic(body.__name__, list(parameters), signature, codegen)

    return wrap


def _intrinsic(name: str, parameters: list[str], signature: Any, codegen: Any) -> Any:
    def typed(typingctx: Any, *_: Any) -> tuple[Any, Any]:
        return signature, codegen

    # numba reads the parameters from the signature, and names its errors after the function.
    typed.__name__ = name
    named = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in ("typingctx", *parameters)]
    typed.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return intrinsic(typed)


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """Convert an address to the pointer that numba's carray() accepts."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Sequence[ir.Value]) -> ir.Value:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), codegen
