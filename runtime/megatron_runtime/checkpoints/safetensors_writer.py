"""Write tensors of known kinds as safetensors files, one tensor at a time.

Format: https://github.com/huggingface/safetensors#format. The library writes what is in memory as a whole; here the
header comes first, from names, shapes and types alone, and the values follow one by one.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_runtime.checkpoints.checkpoint import TensorKind

INDEX_FILE = "model.safetensors.index.json"
_FILE_BYTES = 4 << 30
_ALIGNMENT = 8
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write_safetensors(
    kinds: Mapping[str, TensorKind],
    directory: Path,
    *,
    read: Callable[[str], torch.Tensor],
    written: Callable[[int], None],
    file_bytes: int = _FILE_BYTES,
) -> None:
    """Write model.safetensors to `directory`, or several files and their index where one were too large.

    kinds:      what is written, in this order.
    read:       the tensor of a name.
    written:    is told the bytes of each tensor.
    file_bytes: a file holds one tensor, or several that are together not larger.
    """
    files = _files(kinds, file_bytes)
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    for name, own in zip(names, files, strict=True):
        with (directory / name).open("wb") as file:
            file.write(_header({key: kinds[key] for key in own}))
            for key in own:
                values = read(key).contiguous().view(-1).view(torch.uint8)
                file.write(values.numpy().data)
                written(values.numel())
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(map(num_bytes, kinds.values()))},
            "weight_map": {key: name for name, own in zip(names, files, strict=True) for key in own},
        }
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def num_bytes(kind: TensorKind) -> int:
    """Of a tensor's values."""
    return math.prod(kind.shape) * kind.dtype.itemsize


def _files(kinds: Mapping[str, TensorKind], limit: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    size = 0
    for name, kind in kinds.items():
        own = num_bytes(kind)
        if files[-1] and size + own > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += own
    return files


def _header(kinds: Mapping[str, TensorKind]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, kind in kinds.items():
        end = at + num_bytes(kind)
        fields[name] = {"dtype": _TYPES[kind.dtype], "shape": list(kind.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
