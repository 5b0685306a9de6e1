"""Packed matrices: products, accuracy of the stored weights, and rows that do not depend on their batch.

Every test of a product runs in each instruction set that this CPU has.
"""

import math
import platform
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from run_record import used

from megatron_kernels.cpu.build import VARIANTS
from megatron_kernels.cpu.library import BFLOAT16_INSTRUCTION_SETS, instruction_set, instruction_sets, library
from megatron_kernels.cpu.packing import BLOCK, fits, pack
from megatron_kernels.quantized import (
    BLOCK_SIZES,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
)
from megatron_runtime.models.layers.cpu import PackedLinear, PackedLinears

from .example_steps import stored_blocks

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")
UNPACKED_ROWS = 24
"""Rows from which AMX unpacks integers: MIN_UNPACKED_ROWS of matmul_unpacked.h."""
KINDS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)


@pytest.fixture(params=sorted(VARIANTS.get(platform.machine(), {"portable": ()})))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Select an instruction set of the library during a test."""
    if request.param not in instruction_sets():
        pytest.skip(f"this CPU lacks {request.param}")
    library().megatron_select(request.param.encode())
    used("CPU instruction set", request.param)
    yield request.param
    library().megatron_select(instruction_set().encode())


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x_TK: torch.Tensor) -> torch.Tensor:
    """Return activations as integer products round them: 8 bits, one scale for 32 values."""
    blocks = x_TK.unflatten(1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scale).nan_to_num().round() * scale).flatten(1)


def block_of(format: str | int) -> int:
    """Return the inputs of a block."""
    return BLOCK_SIZES[format][0] if isinstance(format, int) else BLOCK


def packed(format: str | int, outputs: int, inputs: int) -> PackedLinear:
    """Return a random weight in a format, or in one of a GGUF file."""
    if isinstance(format, int):
        return PackedLinear(pack(stored_blocks(format, outputs, inputs), "int4"))
    return PackedLinear(pack(random(outputs, inputs), format))


def is_unpacked(format: str | int, rows: int, isa: str) -> bool:
    """Return whether a product of so many rows unpacks integer weights to bfloat16."""
    return isa == "amx" and rows >= UNPACKED_ROWS and (isinstance(format, int) or format.startswith("int"))


def assert_is_product(linear: PackedLinear, x_TK: torch.Tensor, format: str | int, isa: str) -> None:
    weight = linear.dense()
    if is_unpacked(format, len(x_TK), isa):
        x_TK, weight = x_TK.bfloat16(), weight.bfloat16()
    elif format == "bfloat16" and isa in BFLOAT16_INSTRUCTION_SETS:
        x_TK = x_TK.bfloat16()
    elif isinstance(format, int) or format.startswith("int"):
        x_TK = rounded(x_TK)
    expected = x_TK.double() @ weight.double().T
    # One float32 sum in the order of inputs: its error grows with the square root of their number.
    maximum = 2e-7 * math.sqrt(linear.in_features) * expected.abs().max().item()
    torch.testing.assert_close(linear(x_TK).double(), expected, rtol=0, atol=maximum)


@pytest.mark.parametrize("rows", [13, 40])
@pytest.mark.parametrize("inputs", [576, 1536, 2048, 8192])
def test_a_product_equals_that_of_the_unpacked_weight(inputs: int, rows: int, isa: str) -> None:
    for format in (*FORMATS, *KINDS):
        if inputs % block_of(format) == 0:
            assert_is_product(packed(format, 48, inputs), random(rows, inputs, seed=inputs), format, isa)


def test_many_rows_round_activations_to_8_bits_where_a_panel_is_too_large_to_unpack(isa: str) -> None:
    inputs = 16416
    linear, x_TK = packed("int4", 16, inputs), random(40, inputs)
    assert torch.equal(linear(x_TK)[:13], linear(x_TK[:13]))
    assert_is_product(linear, x_TK[:13], "int4", isa)


@pytest.mark.parametrize("format", [*FORMATS, *KINDS])
def test_random_sizes(format: str | int, isa: str) -> None:
    generator = np.random.default_rng(0)
    block = block_of(format)
    for _ in range(6):
        outputs, inputs = 16 * int(generator.integers(1, 12)), block * int(generator.integers(1, 5))
        rows = int(generator.integers(1, 70))
        assert_is_product(packed(format, outputs, inputs), random(rows, inputs, seed=rows), format, isa)


@pytest.mark.parametrize("format", [*FORMATS, *KINDS])
def test_a_row_has_the_same_bits_in_every_batch(format: str | int, isa: str) -> None:
    """One method has the same bits in every batch. AMX has two methods for integers, for few and for many rows."""
    linear = packed(format, 112, 768)
    x_TK = random(66, 768, seed=1)
    many = linear(x_TK)
    few = torch.cat([linear(x_K) for x_K in x_TK.split(1)])
    assert torch.equal(few, many) != is_unpacked(format, len(x_TK), isa)
    for count in range(1, 34):
        expected = many if is_unpacked(format, count, isa) else few
        assert torch.equal(linear(x_TK[count : 2 * count]), expected[count : 2 * count]), f"{count} rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_instruction_set_packs_the_same_panels(dtype: torch.dtype, isa: str) -> None:
    # Rows of a part of a tensor, at an address that is no multiple of four bytes for types of 16 bits.
    weight_NK = random(48, 640).to(dtype)[:, 1:577]
    blocks = [stored_blocks(kind, 48, 512) for kind in KINDS]

    def panels() -> list[torch.Tensor]:
        dense = [pack(weight_NK, format).data for format in FORMATS]
        return dense + [pack(each, format).data for each in blocks for format in FORMATS]

    found = panels()
    library().megatron_select(b"portable")
    for number, (one, other) in enumerate(zip(found, panels(), strict=True)):
        assert torch.equal(one, other), number


def test_integers_have_the_same_bits_in_every_instruction_set_with_fused_multiplication(isa: str) -> None:
    if isa == "portable":
        pytest.skip("portable multiplies and adds separately")
    linears = [packed(format, 48, 512) for format in ("int8", "int4", *KINDS)]
    x_TK = random(9, 512, seed=2)
    seen = [linear(x_TK) for linear in linears]
    library().megatron_select(instruction_sets()[0].encode())
    for linear, result in zip(linears, seen, strict=True):
        assert torch.equal(linear(x_TK), result)


@pytest.mark.parametrize(
    ("format", "maximum"), [("float32", 0.0), ("bfloat16", 2**-8), ("float16", 2**-11), ("int8", 0.01), ("int4", 0.15)]
)
def test_stored_weights_are_as_accurate_as_the_format_allows(format: str, maximum: float) -> None:
    weight = random(32, 64)
    kept = PackedLinear(pack(weight, format)).dense()
    assert (kept - weight).abs().max() <= maximum * weight.abs().max()


def steps_of_int8(weight_NK: torch.Tensor) -> torch.Tensor:
    blocks = weight_NK.unflatten(1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
    return ((blocks / scale).nan_to_num(0.0, 0.0, 0.0).round().clamp(-127, 127) * scale).flatten(1)


def steps_of_int4(weight_NK: torch.Tensor) -> torch.Tensor:
    blocks = weight_NK.unflatten(1, (-1, BLOCK))
    minimum, maximum = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    scale, offset = ((maximum - minimum) / 15).half().float(), minimum.half().float()
    return (((blocks - offset) / scale).nan_to_num(0.0, 0.0, 0.0).round().clamp(0, 15) * scale + offset).flatten(1)


@pytest.mark.parametrize(("format", "steps"), [("int8", steps_of_int8), ("int4", steps_of_int4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_integer_formats_round_to_the_nearest_step(
    format: str, steps: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    weight = random(64, 256).to(dtype)
    weight[0] = 0.0
    weight[1] = 0.75
    weight[2] *= 1e-5
    assert torch.equal(PackedLinear(pack(weight, format)).dense(), steps(weight.float()))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_gguf_file_keep_their_values(kind: int, isa: str) -> None:
    weight = stored_blocks(kind)
    assert torch.equal(PackedLinear(pack(weight, "int4")).dense(), weight.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_dequantized_exactly_to_float_formats(kind: int) -> None:
    weight = stored_blocks(kind)
    values = weight.dequantize()
    assert torch.equal(PackedLinear(pack(weight, "float32")).dense(), values)
    assert torch.equal(PackedLinear(pack(weight, "bfloat16")).dense(), values.bfloat16().float())
    assert torch.equal(PackedLinear(pack(weight, "float16")).dense(), values.half().float())


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_one_kind_are_concatenated(kind: int) -> None:
    whole = stored_blocks(kind, 96)
    parts = [whole.rows(slice(0, 48)), whole.rows(slice(48, 64)), whole.rows(slice(64, 96))]
    assert torch.equal(pack(parts, "int4").data, pack(whole, "int4").data)


def test_parts_of_different_kinds_keep_their_values(isa: str) -> None:
    parts = [stored_blocks(Q4_K, 64), stored_blocks(Q4_K), stored_blocks(Q6_K)]
    linear = PackedLinears("int4").linear(parts)
    assert isinstance(linear, PackedLinear)
    assert [matrix.outputs for matrix in linear.matrices] == [96, 32]
    assert torch.equal(linear.dense(), torch.cat([part.dequantize() for part in parts]))
    assert_is_product(linear, random(5, 512), "int4", isa)
    whole = PackedLinears("bfloat16").linear(parts)
    assert isinstance(whole, PackedLinear)
    (one,) = whole.matrices
    assert torch.equal(PackedLinear(one).dense(), linear.dense().bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(48, 96), (1024, 512)])
def test_floats_of_every_type_are_packed_exactly(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = random(*shape).to(dtype)
    transposed = weight.T.contiguous().T
    for given in (weight, transposed):
        assert torch.equal(PackedLinear(pack(given, "float32")).dense(), weight.float())
        assert torch.equal(PackedLinear(pack(given, "bfloat16")).dense(), weight.float().bfloat16().float())
        assert torch.equal(PackedLinear(pack(given, "float16")).dense(), weight.float().half().float())


@pytest.mark.parametrize("format", FORMATS)
def test_an_embedding_returns_the_rows_of_its_tied_head(format: str) -> None:
    table = PackedLinears(format).embedding(random(96, 64))  # type: ignore[arg-type]
    ids = torch.tensor([0, 95, 17, 17])
    assert torch.equal(table.look_up(ids), table.dense()[ids])


def test_sizes_that_cannot_be_packed_stay_dense() -> None:
    weight = random(20, 64)
    assert not fits(*weight.shape)
    linear = PackedLinears("int4").linear(weight)
    x_TK = random(3, 64, seed=2)
    torch.testing.assert_close(linear(x_TK), x_TK @ weight.T)
