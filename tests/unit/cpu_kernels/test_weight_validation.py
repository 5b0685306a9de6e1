"""The compiled weight validation equals torch's, and packing several weights equals packing their concatenation."""

import numpy as np
import pytest
import torch

from megatron_kernels.cpu.packing import pack
from megatron_kernels.cpu.weight_validation import sum_and_finiteness, sum_and_finiteness_of_panels
from megatron_kernels.quantized import BLOCK_SIZES, Q4_0, Q4_1, Q8_0, SCALES, QuantizedTensor, concatenate
from megatron_runtime.models.layers.cpu import PackedLinear


def stored(kind: int, rows: int = 7, seed: int = 0) -> QuantizedTensor:
    """Return a quantized weight of random integers with scales below one."""
    values, size = BLOCK_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, 3, size), dtype=np.uint8)
    scales = SCALES[kind]
    halves = np.random.default_rng(seed + 1).random((rows, 3, (scales.stop - scales.start) // 2)).astype(np.float16)
    blocks[..., scales] = halves.view(np.uint8)
    return QuantizedTensor(kind, (rows, 3 * values), torch.from_numpy(blocks.reshape(rows, -1)))


@pytest.mark.parametrize("kind", SCALES)
def test_the_sum_of_blocks_equals_torchs(kind: int) -> None:
    weight = stored(kind)
    flat = weight.blocks_NB.reshape(-1)
    whole = flat[: len(flat) // 8 * 8].clone().view(torch.int64)
    assert sum_and_finiteness(weight) == (int(whole.sum()), True)


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_every_scale_that_is_not_finite_is_detected(kind: int, value: float) -> None:
    size = BLOCK_SIZES[kind][1]
    for block in (0, 10, 20):
        for at in range(SCALES[kind].start, SCALES[kind].stop, 2):
            weight = stored(kind)
            weight.blocks_NB.view(-1)[block * size + at :][:2] = torch.from_numpy(
                np.array([value], dtype=np.float16).view(np.uint8)
            )
            assert not weight.is_finite()
            found = sum_and_finiteness(weight)
            assert found is not None
            assert not found[1]


def test_strided_rows_are_left_to_torch() -> None:
    assert sum_and_finiteness(stored(Q4_0).columns(slice(0, 32))) is None


@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_the_sum_of_panels_equals_torchs(format: str) -> None:
    matrix = pack(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), format)
    words = matrix.data.reshape(-1).view(torch.int64)
    assert sum_and_finiteness_of_panels(matrix) == (int(words.sum()), True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_every_value_of_panels_that_is_not_finite_is_detected(dtype: torch.dtype, value: float) -> None:
    """The largest values of both signs are finite."""
    limits = torch.finfo(dtype)
    matrix = pack(torch.tensor([limits.max, limits.min]).repeat(16, 16), str(dtype).removeprefix("torch."))
    values = matrix.data.view(-1).view(dtype)
    assert sum_and_finiteness_of_panels(matrix)[1]
    for at in range(len(values)):
        before = values[at].clone()
        values[at] = value
        assert not sum_and_finiteness_of_panels(matrix)[1]
        values[at] = before


@pytest.mark.parametrize("format", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0])
def test_several_weights_are_packed_like_their_concatenation(kind: int, format: str) -> None:
    parts = [stored(kind, rows, seed=rows) for rows in (48, 16, 32)]
    together = pack(parts, format)
    assert (together.outputs, together.inputs) == (96, 96)
    assert torch.equal(PackedLinear(together).dense(), PackedLinear(pack(concatenate(parts), format)).dense())
