"""Blocks of every GGML type: values, rows, columns and scales; and what is looked at before they are used."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from megatron_kernels import quantized
from megatron_kernels.quantized import BLOCK_SIZES, KIND_NAMES, SCALES, QuantizedTensor
from megatron_runtime.checkpoints.checkpoint import UnusableWeightsError, VerifiedCheckpoint
from megatron_runtime.checkpoints.gguf import GGUFCheckpoint
from megatron_runtime.models.layers.linear import dense
from megatron_runtime.models.tensors import Part

ROWS, COLUMNS = 6, 768
KINDS = list(SCALES)
NAME = "model.layers.0.mlp.down_proj.weight"


def blocks_of(kind: int, *, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """Random blocks, of the kinds too that the gguf package cannot write; their scales are of a weight's size."""
    values, size = BLOCK_SIZES[kind]
    random = np.random.default_rng(kind)
    blocks = random.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    where = SCALES[kind]
    scales = random.normal(scale=0.01, size=(len(blocks), (where.stop - where.start) // 2)).astype(np.float16)
    blocks[:, where] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def tensor_of(kind: int) -> QuantizedTensor:
    return QuantizedTensor(kind, (ROWS, COLUMNS), torch.from_numpy(blocks_of(kind)))


def test_sizes_are_those_of_the_gguf_package() -> None:
    for kind, name in KIND_NAMES.items():
        theirs = gguf.GGMLQuantizationType[name]
        assert (theirs, gguf.GGML_QUANT_SIZES[theirs]) == (kind, BLOCK_SIZES[kind])


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES.get)
def test_values_are_those_of_the_gguf_package(kind: int) -> None:
    expected = gguf.quants.dequantize(blocks_of(kind), gguf.GGMLQuantizationType(kind))
    whole = tensor_of(kind)
    assert np.array_equal(whole.dequantize().numpy(), expected)
    order = torch.tensor([4, 0, 5])
    assert np.array_equal(whole.rows(order).dequantize().numpy(), expected[order])
    assert np.array_equal(whole.rows(slice(2, 5)).dequantize().numpy(), expected[2:5])
    assert np.array_equal(whole.columns(slice(256, 768)).dequantize().numpy(), expected[:, 256:768])
    two = quantized.concatenate([whole.rows(slice(0, 2)), whole])
    assert np.array_equal(two.dequantize().numpy(), np.concatenate([expected[:2], expected]))
    assert np.array_equal(dense([whole.rows(slice(0, 2)), whole]).numpy(), np.concatenate([expected[:2], expected]))


def test_a_type_without_a_scale_of_its_own_is_decoded() -> None:
    values, size = BLOCK_SIZES[quantized.IQ1_M]
    blocks = np.random.default_rng(0).integers(0, 256, (ROWS, COLUMNS // values * size), dtype=np.uint8)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.IQ1_M)
    found = quantized.dequantize(quantized.IQ1_M, torch.from_numpy(blocks), (ROWS, COLUMNS))
    assert np.array_equal(found.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES.get)
def test_columns_that_cut_a_block_are_rejected(kind: int) -> None:
    with pytest.raises(ValueError, match="16 to 768 cut"):
        tensor_of(kind).columns(slice(16, 768))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[int, np.ndarray], Path]:
    """write(kind, blocks) -> a GGUF file in which one matrix is made of them."""

    def run(kind: int, blocks: np.ndarray) -> Path:
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for add, value in (
            (writer.add_block_count, 1),
            (writer.add_context_length, 64),
            (writer.add_embedding_length, ROWS),
            (writer.add_feed_forward_length, COLUMNS),
            (writer.add_head_count, 1),
        ):
            add(value)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tensor("token_embd.weight", np.zeros((4, ROWS), np.float32))
        writer.add_tensor("blk.0.ffn_down.weight", blocks, raw_dtype=gguf.GGMLQuantizationType(kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return run


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES.get)
def test_a_file_gives_blocks_and_values(kind: int, write: Callable[[int, np.ndarray], Path]) -> None:
    blocks = blocks_of(kind)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))
    checkpoint = GGUFCheckpoint(write(kind, blocks))
    part = (slice(1, 4), slice(256, 512))
    assert np.array_equal(checkpoint.read(NAME).numpy(), expected)
    assert np.array_equal(checkpoint.read(NAME, part).numpy(), expected[part])
    kept = checkpoint.blocks(NAME, part, wanted={kind})
    assert kept is not None
    assert (kept.kind, kept.shape) == (kind, (3, 256))
    assert np.array_equal(kept.dequantize().numpy(), expected[part])
    assert checkpoint.blocks(NAME, part, wanted=set(KINDS) - {kind}) is None
    assert checkpoint.blocks(NAME, (slice(None), slice(8, 16)), wanted={kind}) is None


@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES.get)
def test_a_scale_that_is_not_finite_is_found(kind: int, write: Callable[[int, np.ndarray], Path]) -> None:
    blocks = blocks_of(kind)
    sound = VerifiedCheckpoint(GGUFCheckpoint(write(kind, blocks)))
    sound.read(NAME)
    values, size = BLOCK_SIZES[kind]
    at = 2 * (COLUMNS // values) * size + size + SCALES[kind].stop - 2
    blocks.reshape(-1)[at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    damaged = VerifiedCheckpoint(GGUFCheckpoint(write(kind, blocks)))
    with pytest.raises(UnusableWeightsError, match="down_proj"):
        damaged.read(NAME)
    with pytest.raises(UnusableWeightsError, match="down_proj"):
        damaged.blocks(NAME, wanted={kind})
    damaged.read(NAME, (slice(0, 2),))


def test_digests_of_blocks_tell_files_apart(write: Callable[[int, np.ndarray], Path]) -> None:
    def digest(blocks: np.ndarray, *, as_blocks: bool, parts: list[Part]) -> str:
        checkpoint = VerifiedCheckpoint(GGUFCheckpoint(write(quantized.Q4_1, blocks)))
        for part in parts:
            if as_blocks:
                checkpoint.blocks(NAME, part, wanted={quantized.Q4_1})
            else:
                checkpoint.read(NAME, part)
        return checkpoint.signature().digest

    blocks = blocks_of(quantized.Q4_1)
    pieces: list[Part] = [(slice(0, 4),), (slice(4, 6),)]
    first = digest(blocks, as_blocks=False, parts=[()])
    assert first == digest(blocks.copy(), as_blocks=True, parts=[()])
    assert first == digest(blocks.copy(), as_blocks=False, parts=pieces)
    assert first != digest(blocks.copy(), as_blocks=False, parts=pieces[:1])
    blocks[3, 70] ^= 1
    assert first != digest(blocks, as_blocks=False, parts=[()])
