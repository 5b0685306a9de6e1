"""Read and write model directories as transformers does: config.json and *.safetensors.

A file is the size of its header (8 bytes, little-endian), the header in JSON, and the tensors one after the other:
https://github.com/huggingface/safetensors#format. The `safetensors` package is not used: it does not read parts of a
tensor straight from a mapping, and it writes only files whose tensors are all in memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch

from megatron_runtime.checkpoints.mapped import MappedFile
from megatron_runtime.checkpoints.model_files import (
    MAX_INDEX_BYTES,
    MAX_INDEX_ELEMENTS,
    ModelDirectory,
    ModelFile,
    ModelFileError,
    parse_json,
)
from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.families import config_from_hf
from megatron_runtime.models.tensors import Part, TensorKind
from megatron_runtime.protocol.text import escaped, shown

INDEX_FILE = "model.safetensors.index.json"
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WRITTEN = {dtype: name for name, dtype in _DTYPES.items()} | {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_FILE_BYTES = 4 << 30
_ALIGNMENT = 8
_SIZE_BYTES = 8
_MAX_AXES = 8
_MAX_END_TOKENS = 1024


class SafetensorsFormatError(ValueError):
    """A file is damaged or not of this format. The message names the file and the cause."""


@dataclass(frozen=True, slots=True)
class _Entry:
    file: MappedFile
    offset: int
    size: int


class SafetensorsCheckpoint:
    """Implements Checkpoint for a directory. The constructor reads config.json and the headers of all files."""

    def __init__(self, directory: Path) -> None:
        self.config = read_config(directory)
        self.kinds: dict[str, TensorKind] = {}
        self._entries: dict[str, _Entry] = {}
        for file in _files(ModelDirectory(directory)):
            self._add_file(file)

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """Return a view of the file, of the stored type."""
        kind, entry = self.kinds[name], self._entries[name]
        if not entry.size:
            return torch.empty(kind.shape, dtype=kind.dtype)[part]
        data = entry.file.piece(entry.offset, entry.size)
        # A tensor may begin at any address; its values need one that is a multiple of their size.
        data = data if data.data_ptr() % kind.dtype.itemsize == 0 else data.clone()
        return data.view(kind.dtype).view(kind.shape)[part]

    def blocks(self, name: str, part: Part = (), *, wanted: Container[int]) -> None:
        return None

    def _add_file(self, found: ModelFile) -> None:
        path, file = found.path, MappedFile(found)
        for name, (dtype, shape, start, stop) in _read_header(found).items():
            if name.endswith(_IGNORED_SUFFIXES):
                continue
            if name in self._entries:
                raise SafetensorsFormatError(
                    f"tensor {shown(name)} is in {self._entries[name].file.file.path} and in {path}: remove one of them"
                )
            self.kinds[name] = TensorKind(shape, dtype)
            self._entries[name] = _Entry(file, start, stop - start)


def read_config(directory: Path) -> ModelConfig:
    """Return the configuration in config.json and generation_config.json of a directory.

    Raises UnsupportedModelError, SafetensorsFormatError, ModelFileError, OSError.
    """
    place = ModelDirectory(directory)
    path = directory / "config.json"
    file = place.file("config.json")
    if file is None:
        raise SafetensorsFormatError(f"{path} is missing: complete the directory")
    values = _read_json(file)
    return config_from_hf(values, ends=_end_tokens(place, values), where=str(path))


def _read_json(file: ModelFile, *, lists_tensors: bool = False) -> dict[str, Any]:
    try:
        return file.read_index() if lists_tensors else file.read_json()
    except ModelFileError as error:
        raise SafetensorsFormatError(str(error)) from error


def _end_tokens(directory: ModelDirectory, values: dict[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end an answer: generation_config.json has all of them, config.json often only one."""
    file = directory.file("generation_config.json")
    generation = _read_json(file) if file is not None else {}
    found = generation.get("eos_token_id", values.get("eos_token_id"))
    ends = [] if found is None else found if isinstance(found, list) else [found]
    if len(ends) > _MAX_END_TOKENS or not all(_is_token_id(end) for end in ends):
        raise UnsupportedModelError(
            f"{directory.path} has eos_token_id {shown(found)}: want a token id, or a list of at most {_MAX_END_TOKENS}"
        )
    return tuple(ends)


def _files(directory: ModelDirectory) -> list[ModelFile]:
    """Return the files that the index names; all .safetensors files if there is no index."""
    index = directory.file(INDEX_FILE)
    if index is None:
        return directory.files(".safetensors")
    listed = _read_json(index, lists_tensors=True).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise SafetensorsFormatError(f"{index.path} has no weight_map of tensor names to file names: write it again")
    named = sorted(set(listed.values()))
    found = [directory.file(name) for name in named]
    missing = [name for name, file in zip(named, found, strict=True) if file is None]
    if missing:
        raise SafetensorsFormatError(
            f"{index.path} names {len(named)} files, {len(missing)} are missing, the first is {escaped(missing[0])}: "
            "complete the directory"
        )
    return [file for file in found if file is not None]


def _read_header(found: ModelFile) -> dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]:
    """Return type, shape, first byte and end of each tensor."""
    path = found.path
    with found.open() as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_SIZE_BYTES), "little")
        if size < _SIZE_BYTES or length > min(size - _SIZE_BYTES, MAX_INDEX_BYTES):
            raise SafetensorsFormatError(
                f"{path} is cut short or no safetensors file: it has {size} bytes, its header alone asks for {length}"
            )
        try:
            header = parse_json(file.read(length), where=f"the header of {path}", elements=MAX_INDEX_ELEMENTS)
        except ModelFileError as error:
            raise SafetensorsFormatError(f"{path} has no readable header: {error}") from error
    begin = _SIZE_BYTES + length
    return {
        name: _place(name, entry, begin=begin, size=size, path=path)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _place(
    name: str, entry: object, *, begin: int, size: int, path: Path
) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Return one entry of the header, checked against the size of the file. begin: first byte of the tensors."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    kind, extents, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(kind, str) and _are_sizes(extents, _MAX_AXES) and _are_sizes(offsets, 2) and len(offsets) == 2):
        raise SafetensorsFormatError(
            f"tensor {shown(name)} of {path} needs a dtype, a shape of at most {_MAX_AXES} whole numbers and two "
            "data_offsets in its header: write the file again"
        )
    dtype, shape = _DTYPES.get(kind), tuple(extents)
    if dtype is None:
        raise UnsupportedModelError(
            f"tensor {shown(name)} of {path} has type {escaped(kind)}: supported are {', '.join(_DTYPES)}"
        )
    start, stop = (begin + offset for offset in offsets)
    if stop - start != prod(shape) * dtype.itemsize:
        raise SafetensorsFormatError(
            f"tensor {shown(name)} of {path} has {stop - start} bytes, its shape {shape} in {kind} "
            f"asks for {prod(shape) * dtype.itemsize}"
        )
    if stop > size:
        raise SafetensorsFormatError(
            f"{path} is cut short: tensor {shown(name)} ends at byte {stop}, the file has {size}: fetch it again"
        )
    return dtype, shape, start, stop


def _are_sizes(values: Any, most: int) -> TypeGuard[list[int]]:
    """Return whether `values` is a list of at most `most` whole numbers of 63 bits."""
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 for value in values)
    )


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def write_safetensors(
    kinds: Mapping[str, TensorKind],
    directory: Path,
    *,
    read: Callable[[str], torch.Tensor],
    written: Callable[[int], None],
    file_bytes: int = _FILE_BYTES,
) -> None:
    """Write tensors to `directory`, one at a time: model.safetensors, or several files with an index.

    kinds:      name, shape and type of each tensor, in the order of the file.
    read:       returns the tensor of a name.
    written:    called with the number of bytes of each tensor written.
    file_bytes: a new file begins before a tensor that would make the file larger than this.
    """
    files = _split(kinds, file_bytes)
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
    """Return the size of a tensor's values in bytes."""
    return prod(kind.shape) * kind.dtype.itemsize


def _split(kinds: Mapping[str, TensorKind], limit: int) -> list[list[str]]:
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
        start, at = at, at + num_bytes(kind)
        fields[name] = {"dtype": _WRITTEN[kind.dtype], "shape": list(kind.shape), "data_offsets": [start, at]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
