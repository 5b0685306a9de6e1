"""Packed matrices: products, accuracy of the stored weights, and rows that do not depend on their batch."""

import numpy as np
import pytest
import torch

from megatron_kernels.cpu.packing import fits, pack
from megatron_kernels.quantized import BLOCK_SIZES, Q4_0, Q4_1, Q8_0, QuantizedTensor
from megatron_runtime.models.layers.cpu import NativeLinear, NativeLinears

FORMATS = ("float32", "bfloat16", "int8", "int4")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x_TK: torch.Tensor) -> torch.Tensor:
    """Return activations as integer products round them: 8 bits, one scale for 32 values."""
    blocks = x_TK.unflatten(1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scale).nan_to_num().round() * scale).flatten(1)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 130])
def test_a_product_equals_that_of_the_unpacked_weight(format: str, rows: int) -> None:
    linear = NativeLinear(pack(random(48, 96), format))
    x_TK = random(rows, 96, seed=rows)
    seen = rounded(x_TK) if format.startswith("int") else x_TK
    torch.testing.assert_close(linear(x_TK), seen @ linear.dense().T, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(("format", "most"), [("float32", 0.0), ("bfloat16", 2**-8), ("int8", 0.01), ("int4", 0.15)])
def test_stored_weights_are_as_accurate_as_the_format_allows(format: str, most: float) -> None:
    weight = random(32, 64)
    kept = NativeLinear(pack(weight, format)).dense()
    assert (kept - weight).abs().max() <= most * weight.abs().max()


def stored_blocks(kind: int) -> QuantizedTensor:
    """Return a weight [32, 96] as stored in a file, with padding between its rows."""
    generator = np.random.default_rng(kind)
    blocks = generator.integers(0, 256, (32, 3, BLOCK_SIZES[kind][1]), dtype=np.uint8)
    halves = generator.random((32, 3, 2)).astype(np.float16).view(np.uint8)
    blocks[..., : 4 if kind == Q4_1 else 2] = halves[..., : 4 if kind == Q4_1 else 2]
    rows = np.concatenate([blocks.reshape(32, -1), np.full((32, 6), 255, dtype=np.uint8)], axis=1)
    return QuantizedTensor(kind, (32, 96), torch.from_numpy(rows)[:, :-6])


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0])
def test_blocks_of_a_gguf_file_keep_their_values(kind: int) -> None:
    weight = stored_blocks(kind)
    torch.testing.assert_close(NativeLinear(pack(weight, "int4")).dense(), weight.dequantize(), rtol=1e-6, atol=2e-3)


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0])
def test_blocks_are_dequantized_exactly_to_float_formats(kind: int) -> None:
    weight = stored_blocks(kind)
    assert torch.equal(NativeLinear(pack(weight, "float32")).dense(), weight.dequantize())
    assert torch.equal(NativeLinear(pack(weight, "bfloat16")).dense(), weight.dequantize().bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(48, 96), (1024, 512)])
def test_floats_of_every_type_are_packed_exactly(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = random(*shape).to(dtype)
    transposed = weight.T.contiguous().T
    for given in (weight, transposed):
        assert torch.equal(NativeLinear(pack(given, "float32")).dense(), weight.float())
        assert torch.equal(NativeLinear(pack(given, "bfloat16")).dense(), weight.float().bfloat16().float())


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_in_every_batch(format: str) -> None:
    linear = NativeLinear(pack(random(64, 128), format))
    x_TK = random(40, 128, seed=1)
    together = linear(x_TK)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 20)):
        assert torch.equal(linear(x_TK[rows]), together[rows])


@pytest.mark.parametrize("format", FORMATS)
def test_an_embedding_returns_the_rows_of_its_tied_head(format: str) -> None:
    table = NativeLinears(format).tied(random(96, 64))
    ids = torch.tensor([0, 95, 17, 17])
    assert torch.equal(table.look_up(ids), table.dense()[ids])


def test_sizes_that_cannot_be_packed_stay_dense() -> None:
    weight = random(20, 64)
    assert not fits(*weight.shape)
    linear = NativeLinears("int4").linear(weight)
    x_TK = random(3, 64, seed=2)
    torch.testing.assert_close(linear(x_TK), x_TK @ weight.T)
