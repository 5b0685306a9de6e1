"""Weights from a directory as transformers writes it: config.json and *.safetensors.

A file is the size of its header (8 bytes, little-endian), the header in JSON, and the tensors one after the other:
https://github.com/huggingface/safetensors#format. Read here by hand, so that parts are taken straight from the mapping.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_runtime.loading.checkpoint import Part, TensorKind, UnsupportedModelError
from megatron_runtime.loading.mapped import MappedFile
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.families import config_from_hf

INDEX_FILE = "model.safetensors.index.json"
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER = 100 << 20
_SIZE_BYTES = 8


class SafetensorsFormatError(ValueError):
    """A file is damaged or not of this format. The message names it and what is wrong."""


@dataclass(frozen=True, slots=True)
class _Entry:
    file: MappedFile
    offset: int
    size: int


class SafetensorsCheckpoint:
    """A model in a directory. Making one reads config.json and the headers of all files."""

    def __init__(self, directory: Path) -> None:
        self.config = read_config(directory)
        self.kinds: dict[str, TensorKind] = {}
        self._entries: dict[str, _Entry] = {}
        for path in _files(directory):
            self._add_file(path)

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """A view of the file, of the stored type."""
        kind, entry = self.kinds[name], self._entries[name]
        if not entry.size:
            return torch.empty(kind.shape, dtype=kind.dtype)[part]
        data = entry.file.piece(entry.offset, entry.size)
        # A tensor may begin anywhere, its values need an address that is a multiple of their size.
        data = data if data.data_ptr() % kind.dtype.itemsize == 0 else data.clone()
        return data.view(kind.dtype).view(kind.shape)[part]

    def blocks(self, name: str, part: Part = (), *, wanted: Container[int]) -> None:
        return None

    def _add_file(self, path: Path) -> None:
        file = MappedFile(path)
        for name, (dtype, shape, start, stop) in _read_header(path).items():
            if name.endswith(_IGNORED_SUFFIXES):
                continue
            if name in self._entries:
                raise SafetensorsFormatError(
                    f"tensor {name!r} is in {self._entries[name].file.path} and in {path}: remove one of them"
                )
            self.kinds[name] = TensorKind(shape, dtype)
            self._entries[name] = _Entry(file, start, stop - start)


def read_config(directory: Path) -> ModelConfig:
    """The configuration in a directory's config.json and generation_config.json. Raises UnsupportedModelError."""
    path = directory / "config.json"
    values = _read_json(path)
    return config_from_hf(values, ends=_end_tokens(directory, values), where=str(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise SafetensorsFormatError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise SafetensorsFormatError(f"{path} holds {type(values).__name__}: want a JSON object")
    return values


def _end_tokens(directory: Path, values: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json knows every token that ends an answer; config.json often only one."""
    path = directory / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    found = generation.get("eos_token_id", values.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)


def _files(directory: Path) -> list[Path]:
    """Those that the index names; all, where there is no index."""
    index = directory / INDEX_FILE
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    named = sorted(set(_read_json(index).get("weight_map", {}).values()))
    missing = [name for name in named if not (directory / name).is_file()]
    if missing:
        raise SafetensorsFormatError(
            f"{index} names {len(named)} files, {len(missing)} are missing, the first is {missing[0]}: "
            "complete the directory"
        )
    return [directory / name for name in named]


def _read_header(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]:
    """Type, shape, first byte and the byte after the last, of each tensor."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_SIZE_BYTES), "little")
        if size < _SIZE_BYTES or length > min(size - _SIZE_BYTES, _MAX_HEADER):
            raise SafetensorsFormatError(
                f"{path} is cut short or no safetensors file: it has {size} bytes, its header alone asks for {length}"
            )
        try:
            header: Mapping[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise SafetensorsFormatError(f"{path} has no readable header: {error}") from error
    begin, found = _SIZE_BYTES + length, {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = _DTYPES.get(entry["dtype"]), tuple(entry["shape"])
        if dtype is None:
            raise UnsupportedModelError(
                f"tensor {name!r} of {path} has type {entry['dtype']}: supported are {', '.join(_DTYPES)}"
            )
        start, stop = (begin + offset for offset in entry["data_offsets"])
        if stop - start != prod(shape) * dtype.itemsize:
            raise SafetensorsFormatError(
                f"tensor {name!r} of {path} has {stop - start} bytes, its shape {shape} in {entry['dtype']} "
                f"asks for {prod(shape) * dtype.itemsize}"
            )
        if stop > size:
            raise SafetensorsFormatError(
                f"{path} is cut short: tensor {name!r} ends at byte {stop}, the file has {size}: fetch it again"
            )
        found[name] = (dtype, shape, start, stop)
    return found
