"""Directories as transformers saves them, of every architecture in a corpus of headers: each is a model of this
runtime, or is rejected with a sentence that names the backend for it.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from checkpoint_headers import headers

from megatron_runtime.checkpoints.safetensors import SafetensorsCheckpoint
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.models.families import FAMILIES
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


def test_the_corpus_has_every_family_and_many_others() -> None:
    found = {header["model_type"] for header in headers()}
    assert found >= {*FAMILIES, *MULTIMODAL}
    assert len(found) >= 60
