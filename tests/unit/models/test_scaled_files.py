"""Directories of safetensors whose matrices are FP8 or integers with scales: each reads as the values that it stands
for, whole and in parts; other methods are rejected by name.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoint import LLAMA, random_tensors, write_model
from safetensors.torch import save_file

from megatron_runtime.checkpoints.safetensors import SafetensorsCheckpoint
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.models.tensors import TensorKind
from megatron_runtime.models.weights import load_weights

Tensors = dict[str, torch.Tensor]
Stored = tuple[Tensors, torch.Tensor]
"""The tensors of one matrix in the file, by the endings of their names, and its values."""

BLOCK, GROUP = 16, 8


def spread(scales: torch.Tensor, shape: torch.Size, rows: int, columns: int) -> torch.Tensor:
    whole = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return whole[: shape[0], : shape[1]]


def fp8_in_blocks(weight: torch.Tensor) -> Stored:
    counts = [-(-size // BLOCK) for size in weight.shape]
    scales = torch.rand(counts) + 0.5
    whole = spread(scales, weight.shape, BLOCK, BLOCK)
    values = (weight / whole).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scales}, values.float() * whole


def fp8_with_one_scale(weight: torch.Tensor) -> Stored:
    values = (weight / 0.25).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.25)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(1.0)}, values.float() * scale


def int8_by_channel(weight: torch.Tensor) -> Stored:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": values, "weight_scale": scales}, values.float() * scales.float()


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack numbers from -2**(bits - 1) on along the last axis, lowest bits first, by plain integer arithmetic."""
    count, offset = 32 // bits, 1 << (bits - 1)
    rows = []
    for row in values.tolist():
        row += [-offset] * (-len(row) % count)
        packed = [
            sum((value + offset) << (bits * place) for place, value in enumerate(row[at : at + count]))
            for at in range(0, len(row), count)
        ]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in packed])
    return torch.tensor(rows, dtype=torch.int32)


def packed_in_groups(weight: torch.Tensor, *, bits: int = 4, shifted: bool = False, ordered: bool = False) -> Stored:
    outputs, inputs = weight.shape
    groups, maximum = inputs // GROUP, 1 << (bits - 1)
    scales = (torch.rand(outputs, groups) + 0.5) / maximum
    group_of = torch.randperm(inputs) // GROUP if ordered else torch.arange(inputs) // GROUP
    zeros = torch.zeros(outputs, groups, dtype=torch.int64)
    if shifted:
        zeros = torch.randint(-maximum, maximum, (outputs, groups))
    values = (weight / scales[:, group_of] + zeros[:, group_of]).round().clamp(-maximum, maximum - 1).long()
    held = {
        "weight_packed": words(values, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if shifted:
        held["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    if ordered:
        held["weight_g_idx"] = group_of.int()
    return held, (values - zeros[:, group_of]).float() * scales[:, group_of]


COMPRESSED = {"quant_method": "compressed-tensors"}
CASES: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Stored]]] = {
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, fp8_in_blocks),
    "fp8 with one scale": ({**COMPRESSED, "format": "float-quantized"}, fp8_with_one_scale),
    "int8 by channel": ({**COMPRESSED, "format": "int-quantized"}, int8_by_channel),
    "int4 in groups": ({**COMPRESSED, "format": "pack-quantized"}, packed_in_groups),
    "int8 in words": ({**COMPRESSED, "format": "pack-quantized"}, lambda weight: packed_in_groups(weight, bits=8)),
    "int4 with zero points": (
        {**COMPRESSED, "format": "pack-quantized"},
        lambda weight: packed_in_groups(weight, shifted=True),
    ),
    "int4, reordered": (
        {**COMPRESSED, "format": "pack-quantized"},
        lambda weight: packed_in_groups(weight, ordered=True),
    ),
}


def write(directory: Path, quantization: dict[str, Any], store: Callable[[torch.Tensor], Stored]) -> Tensors:
    """Write a model whose projections are stored in scaled form; return the values of all its tensors."""
    torch.manual_seed(0)
    tensors = random_tensors(LLAMA)
    write_model(directory, LLAMA, tensors)
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            parts, values = store(tensor)
            tensors[name] = values.bfloat16()
            stored |= {f"{name.removesuffix('weight')}{ending}": part for ending, part in parts.items()}
        else:
            stored[name] = tensor
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return tensors


@pytest.mark.parametrize("case", CASES)
def test_scaled_matrices_read_as_their_values(case: str, tmp_path: Path) -> None:
    expected = write(tmp_path, *CASES[case])
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.kinds) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.kinds[name] == TensorKind(tuple(tensor.shape), tensor.dtype)
        assert torch.equal(checkpoint.read(name), tensor)
        part = (slice(3, 7), slice(5, 13)) if tensor.dim() == 2 else (slice(3, 7),)
        assert torch.equal(checkpoint.read(name, part), tensor[part])
    gate_up = load_weights(checkpoint, torch.float32).layers[1].mlp.gate_up_FD.dense()
    names = [f"model.layers.1.mlp.{each}_proj.weight" for each in ("gate", "up")]
    assert torch.equal(gate_up, torch.cat([expected[name] for name in names]).float())


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "gptq"}, "'gptq'.*'fp8' and 'compressed-tensors'.*backend: VLLM"),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'.*'pack-quantized'"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R4": {}}}}, "transform_config"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.*'sparse-24-bitmask'"),
        ({}, "weight.*float8_e4m3fn.*quantization_config"),
        ({"quant_method": "fp8", "weight_block_size": [BLOCK, 2 * BLOCK]}, "weight_scale_inv.*does not fit"),
    ],
)
def test_other_methods_are_rejected_by_name(quantization: dict[str, Any], named: str, tmp_path: Path) -> None:
    write(tmp_path, quantization, fp8_in_blocks)
    with pytest.raises(UnsupportedModelError, match=named):
        SafetensorsCheckpoint(tmp_path)
