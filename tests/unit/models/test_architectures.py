"""Directories as transformers saves them, of every architecture in a corpus of headers: each is a model of this
runtime, or is rejected with a sentence that names the backend for it.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

import gguf
import pytest
from checkpoint_headers import headers

from megatron_runtime.checkpoints.gguf import GGUFCheckpoint
from megatron_runtime.checkpoints.safetensors import SafetensorsCheckpoint
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.models.families import FAMILIES, GGUF_ARCHITECTURES
from megatron_runtime.models.weights import require_fitting

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "BOOL": 1}
MULTIMODAL = {"gemma3", "llava", "mistral3"}
"""Models with a text part of a supported family."""


def write(header: dict[str, Any], directory: Path) -> None:
    """Write config.json and a file of the header's tensors, whose values are a hole."""
    (directory / "config.json").write_text(json.dumps(header["config"]))
    fields, end = {}, 0
    for name, (dtype, shape) in header["tensors"].items():
        start, end = end, end + prod(shape) * SIZES[dtype]
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(fields).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize("header", headers(), ids=lambda header: header["model_type"])
def test_an_architecture_loads_or_is_rejected_with_a_remedy(header: dict[str, Any], tmp_path: Path) -> None:
    write(header, tmp_path)
    if header["model_type"] in {*FAMILIES, *MULTIMODAL}:
        require_fitting(SafetensorsCheckpoint(tmp_path))
        return
    with pytest.raises(UnsupportedModelError, match=r"has architectures \['\w+'\].*`backend: VLLM` runs others"):
        SafetensorsCheckpoint(tmp_path)


UNSUPPORTED_FIELDS = {
    "llama": {"attention_bias": True},
    "phi3": {"partial_rotary_factor": 0.75},
    "qwen3": {"hidden_act": "gelu"},
    "gemma3_text": {"final_logit_softcapping": 30.0},
    "granite": {"rope_scaling": {"rope_type": "proportional"}},
    "mistral": {"layer_types": ["linear_attention", "full_attention"]},
    "olmo3": {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}, "full_attention": {}}},
}
"""Fields of configurations that a model of another kind has."""


@pytest.mark.parametrize("model_type", UNSUPPORTED_FIELDS)
def test_a_variant_of_a_family_is_rejected_with_a_remedy(model_type: str, tmp_path: Path) -> None:
    header = next(header for header in headers() if header["model_type"] == model_type)
    config = {**header["config"], **UNSUPPORTED_FIELDS[model_type]}
    if "rope_scaling" in UNSUPPORTED_FIELDS[model_type]:
        del config["rope_parameters"]
    write({**header, "config": config}, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r" (has|lists) .*(supported|want).*; `backend: VLLM` runs others$"):
        SafetensorsCheckpoint(tmp_path)


def test_a_gguf_file_of_any_other_architecture_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    """Of all that llama.cpp has. vLLM's engines read GGUF files as others do, so the remedy is another format."""
    path = tmp_path / "m.gguf"
    others = set(gguf.MODEL_ARCH_NAMES.values()) - set(GGUF_ARCHITECTURES)
    assert len(others) > 90
    for architecture in others:
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(1)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        message = rf"has architecture '{architecture}': supported are .*; `backend: VLLM` runs others, from safetensors"
        with pytest.raises(UnsupportedModelError, match=message):
            GGUFCheckpoint(path)


def test_the_corpus_has_every_family_and_many_others() -> None:
    found = {header["model_type"] for header in headers()}
    assert found >= {*FAMILIES, *MULTIMODAL}
    assert len(found) >= 60
