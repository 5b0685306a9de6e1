"""Operations on one row of floats. Lengths are multiples of 8, of 32 for quantize()."""

from __future__ import annotations

from llvmlite import ir

from megatron_kernels.cpu.ir import F16, F32, F32_V, I8, I16, I32, I32_V, I64, LANES, Code, constant, function

_HALF = ir.VectorType(I16, LANES)
_BYTES = ir.VectorType(I8, LANES)


@function(x=I64, weight=I64, y=I64, count=I64, epsilon=F32)
def rms_norm(code: Code, a: dict[str, ir.Value]) -> None:
    """y = x / sqrt(mean(x²) + epsilon) · weight"""
    b = code.b
    (squares,) = code.loop(
        a["count"],
        [constant(F32_V, 0.0)],
        lambda i, s: [code.fma(v := code.load(F32_V, code.at(a["x"], i, 4)), v, s[0])],
        step=LANES,
    )
    mean = b.fdiv(code.sum(squares), b.sitofp(a["count"], F32))
    root = code.call("llvm.sqrt.f32", F32, b.fadd(mean, a["epsilon"]))
    factor = code.splat(b.fdiv(constant(F32, 1.0), root))

    def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        scaled = b.fmul(code.load(F32_V, code.at(a["x"], i, 4)), factor)
        code.store(b.fmul(scaled, code.load(F32_V, code.at(a["weight"], i, 4))), code.at(a["y"], i, 4))
        return []

    code.loop(a["count"], [], body, step=LANES)


@function(x=I64, y=I64, count=I64)
def add(code: Code, a: dict[str, ir.Value]) -> None:
    """y += x"""

    def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        at = code.at(a["y"], i, 4)
        code.store(code.b.fadd(code.load(F32_V, at), code.load(F32_V, code.at(a["x"], i, 4))), at)
        return []

    code.loop(a["count"], [], body, step=LANES)


@function(x=I64, y=I64, count=I64, factor=F32)
def scale(code: Code, a: dict[str, ir.Value]) -> None:
    """y = x · factor"""
    factor = code.splat(a["factor"])

    def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        code.store(code.b.fmul(code.load(F32_V, code.at(a["x"], i, 4)), factor), code.at(a["y"], i, 4))
        return []

    code.loop(a["count"], [], body, step=LANES)


@function(gate=I64, up=I64, y=I64, count=I64)
def silu_product(code: Code, a: dict[str, ir.Value]) -> None:
    """y = gate · sigmoid(gate) · up"""

    def activation(gate: ir.Value) -> ir.Value:
        return gate

    _gated(code, a, activation)


@function(gate=I64, up=I64, y=I64, count=I64)
def gelu_product(code: Code, a: dict[str, ir.Value]) -> None:
    """y = gate · gelu · up, by the approximation with tanh: 0.5 (1 + tanh(z)) is sigmoid(2 z)."""

    def activation(gate: ir.Value) -> ir.Value:
        cubic = code.fma(code.b.fmul(gate, gate), constant(F32_V, 0.044715), constant(F32_V, 1.0))
        return code.b.fmul(code.b.fmul(gate, cubic), constant(F32_V, 1.5957691216057308))

    _gated(code, a, activation)


def _gated(code: Code, a: dict[str, ir.Value], activation: object) -> None:
    """y = gate · sigmoid(activation(gate)) · up"""
    assert callable(activation)
    b = code.b

    def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        gate = code.load(F32_V, code.at(a["gate"], i, 4))
        below = b.fadd(constant(F32_V, 1.0), code.exp(b.fsub(constant(F32_V, 0.0), activation(gate))))
        product = b.fmul(b.fdiv(gate, below), code.load(F32_V, code.at(a["up"], i, 4)))
        code.store(product, code.at(a["y"], i, 4))
        return []

    code.loop(a["count"], [], body, step=LANES)


@function(F32, x=I64, count=I64)
def exponentials(code: Code, a: dict[str, ir.Value]) -> ir.Value:
    """x = e^(x - max(x)); return the sum."""
    b = code.b
    (largest,) = code.loop(
        a["count"],
        [constant(F32_V, float("-inf"))],
        lambda i, s: [code.max(s[0], code.load(F32_V, code.at(a["x"], i, 4)))],
        step=LANES,
    )
    top = code.splat(code.largest(largest))

    def body(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        at = code.at(a["x"], i, 4)
        value = code.exp(b.fsub(code.load(F32_V, at), top))
        code.store(value, at)
        return [b.fadd(sums[0], value)]

    (total,) = code.loop(a["count"], [constant(F32_V, 0.0)], body, step=LANES)
    return code.sum(total)


@function(x=I64, cos=I64, sin=I64, half=I64)
def rotate(code: Code, a: dict[str, ir.Value]) -> None:
    """Rotate one head of 2 · half floats in place; `cos` and `sin` have half floats."""
    b = code.b

    def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        low, high = code.at(a["x"], i, 4), code.at(code.at(a["x"], a["half"], 4), i, 4)
        cos, sin = (code.load(F32_V, code.at(a[name], i, 4)) for name in ("cos", "sin"))
        first, second = code.load(F32_V, low), code.load(F32_V, high)
        code.store(b.fsub(b.fmul(first, cos), b.fmul(second, sin)), low)
        code.store(code.fma(first, sin, b.fmul(second, cos)), high)
        return []

    code.loop(a["half"], [], body, step=LANES)


@function(x=I64, y=I64, scales=I64, count=I64)
def quantize(code: Code, a: dict[str, ir.Value]) -> None:
    """y = round(x / scale) in -127 … 127, for each 32 floats; `scales` gets (scale, scale · sum(y)) of them."""
    b = code.b

    def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        vectors = [code.load(F32_V, code.at(a["x"], i, 4), 32 * part) for part in range(4)]
        sizes = [code.call("llvm.fabs.v8f32", F32_V, vector) for vector in vectors]
        most = code.largest(code.max(code.max(sizes[0], sizes[1]), code.max(sizes[2], sizes[3])))
        is_zero = b.fcmp_ordered("==", most, constant(F32, 0.0))
        inverse = b.select(is_zero, constant(F32, 0.0), b.fdiv(constant(F32, 127.0), most))
        factor = code.splat(inverse)
        total = constant(I32_V, 0)
        for part, vector in enumerate(vectors):
            rounded = code.call("llvm.rint.v8f32", F32_V, b.fmul(vector, factor))
            number = b.fptosi(rounded, I32_V)
            total = b.add(total, number)
            code.store(b.trunc(number, _BYTES), b.add(a["y"], i), LANES * part)
        scale = b.fmul(most, constant(F32, 1 / 127))
        at = code.at(a["scales"], b.lshr(i, constant(I64, 5)), 8)
        code.store(scale, at)
        code.store(b.fmul(scale, b.sitofp(code.sum(total), F32)), at, 4)
        return []

    code.loop(a["count"], [], body, step=32)


@function(x=I64, y=I64, count=I64)
def widen(code: Code, a: dict[str, ir.Value]) -> None:
    """y = x from bfloat16"""

    def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        code.store(load_bfloat16(code, code.at(a["x"], i, 2)), code.at(a["y"], i, 4))
        return []

    code.loop(a["count"], [], body, step=LANES)


@function(x=I64, y=I64, count=I64)
def narrow(code: Code, a: dict[str, ir.Value]) -> None:
    """y = x as bfloat16, to the nearest, halves to even"""
    b = code.b

    def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        rounded = rounded_bfloat16(code, code.load(F32_V, code.at(a["x"], i, 4)))
        code.store(b.trunc(b.lshr(rounded, constant(I32_V, 16)), _HALF), code.at(a["y"], i, 2))
        return []

    code.loop(a["count"], [], body, step=LANES)


def rounded_bfloat16(code: Code, value: ir.Value) -> ir.Value:
    """Bits of floats whose upper halves are the nearest bfloat16."""
    b = code.b
    bits = b.bitcast(value, I32_V)
    odd = b.and_(b.lshr(bits, constant(I32_V, 16)), constant(I32_V, 1))
    return b.add(bits, b.add(odd, constant(I32_V, 0x7FFF)))


def load_bfloat16(code: Code, address: ir.Value) -> ir.Value:
    bits = code.b.zext(code.load(_HALF, address), I32_V)
    return code.b.bitcast(code.b.shl(bits, constant(I32_V, 16)), F32_V)


@function(x=I64, count=I64, value=F32)
def fill(code: Code, a: dict[str, ir.Value]) -> None:
    """x = value; any count."""

    def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        code.store(a["value"], code.at(a["x"], i, 4))
        return []

    code.loop(a["count"], [], body)


@function(x=I64, value=F32)
def put(code: Code, a: dict[str, ir.Value]) -> None:
    code.store(a["value"], a["x"])


@function(F32, x=I64)
def get(code: Code, a: dict[str, ir.Value]) -> ir.Value:
    return code.load(F32, a["x"])


@function(F32, x=I64)
def get_half(code: Code, a: dict[str, ir.Value]) -> ir.Value:
    return code.b.fpext(code.load(F16, a["x"]), F32)


@function(F32, x=I64)
def get_bfloat16(code: Code, a: dict[str, ir.Value]) -> ir.Value:
    bits = code.b.zext(code.load(I16, a["x"]), I32)
    return code.b.bitcast(code.b.shl(bits, constant(I32, 16)), F32)


@function(I32, x=I64)
def get_byte(code: Code, a: dict[str, ir.Value]) -> ir.Value:
    return code.b.sext(code.load(I8, a["x"]), I32)
