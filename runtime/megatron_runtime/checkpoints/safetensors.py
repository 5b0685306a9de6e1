"""Reads and writes model directories in transformers' format, which contain config.json and *.safetensors.

A file contains the size of its header (8 bytes, little-endian), the header in JSON, and the tensors one after the
other: https://github.com/huggingface/safetensors#format. The `safetensors` package is not used, because it cannot read
parts of a tensor directly from a mapped file, and cannot write a file without holding all its tensors in memory.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron_runtime.checkpoints.mapped import MappedFile
from megatron_runtime.checkpoints.model_files import (
    MAX_AXES,
    MAX_INDEX_BYTES,
    MAX_INDEX_ELEMENTS,
    ModelDirectory,
    ModelFile,
    ModelFileError,
    end_tokens,
    parse_json,
    size_of,
)
from megatron_runtime.checkpoints.scaled import STORED_DTYPES, scaled_matrices
from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.config_fields import Fields
from megatron_runtime.models.families import config_from_hf
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.text import escaped, shown

_log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_TEXT_PREFIXES = ("model.", "", "language_model.model.", "model.language_model.", "language_model.")
"""Prefixes of the text model's tensors.

They are for a causal model of transformers, for a model without a head, and for the text part of a multimodal model.
Another prefix is used if only one tensor has the name of an embedding.
"""
_IGNORED = re.compile(
    r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)|.*\.(attn|attention)\.(masked_)?bias|.*\.[kv]_scale|mtp\..*"
)
"""Names of tensors that a decoder computes itself or does not use."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FILE_BYTES = 4 << 30
_ALIGNMENT = 64
"""Alignment of the first tensor in a file, in bytes."""
_SIZE_BYTES = 8
_LARGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The description of a tensor in a file. offset: position of the tensor's first byte in the file."""

    kind: TensorKind
    offset: int


class SafetensorsCheckpoint(Checkpoint):
    """The checkpoint in a directory of .safetensors files.

    The constructor reads config.json and the headers of all files.
    """

    def __init__(self, directory: Path) -> None:
        stored: dict[str, tuple[MappedFile, StoredTensor]] = {}
        for file in _files(ModelDirectory(directory)):
            mapped = MappedFile(file)
            for name, entry in read_header(file, DTYPES | STORED_DTYPES)[0].items():
                if name in stored:
                    other = stored[name][0].file.path
                    raise ModelFileError(f"tensor {shown(name)} is in {other} and in {file.path}: remove one of them")
                stored[name] = mapped, entry
        self._entries: dict[str, tuple[MappedFile, StoredTensor]] = {}
        self.kinds: dict[str, TensorKind] = {}
        self.config, values = read_config(directory), _config_json(directory)
        has_other_parts = "text_config" in values.values
        for own_name, name in _names(stored, has_other_parts=has_other_parts).items():
            if name in self._entries:
                raise ModelFileError(f"{directory} has two tensors for {shown(name)}: remove {shown(own_name)}")
            mapped, entry = stored[own_name]
            self._entries[name], self.kinds[name] = (mapped, entry), entry.kind
        self._scaled, parts = scaled_matrices(self.kinds, values.below("quantization_config"), self._stored)
        held = {name: kind for name, kind in self.kinds.items() if name not in parts}
        for name, kind in held.items():
            if kind.dtype not in DTYPES.values():
                raise UnsupportedModelError(
                    f"tensor {name!r} of {directory} has type {kind.dtype}: supported are {', '.join(DTYPES)}, and "
                    "others with the scales that `quantization_config` of config.json announces"
                )
        self.kinds = held | {name: TensorKind(each.shape, torch.bfloat16) for name, each in self._scaled.items()}
        is_untied = _says_untied(values) and f"model.{_EMBEDDING}" in stored
        if _HEAD not in self.kinds and not self.config.tie_embeddings and not is_untied:
            _log.warning("%s has no %s: logits are computed with the embedding", directory, _HEAD)
            self.config = replace(self.config, tie_embeddings=True)
        elif self.config.tie_embeddings and self._has_own_head():
            _log.warning("%s has a %s that differs from the embedding: logits are computed with it", directory, _HEAD)
            self.config = replace(self.config, tie_embeddings=False)

    def _has_own_head(self) -> bool:
        """Return whether the files have an output head that differs from the embedding, as some merged adapters do."""
        head, embedding = self.kinds.get(_HEAD), self.kinds.get(f"model.{_EMBEDDING}")
        if head is None or embedding is None or head.shape != embedding.shape:
            return False
        return not torch.equal(self.read(_HEAD), self.read(f"model.{_EMBEDDING}").to(head.dtype))

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """Return a tensor, or a part of it, as a view of the file in the stored type.

        For matrices with scales (see scaled.py), return a copy with bfloat16 values.
        """
        scaled = self._scaled.get(name)
        return self._stored(name, part) if scaled is None else scaled.read(self._stored, part)

    def _stored(self, name: str, part: Part) -> torch.Tensor:
        file, entry = self._entries[name]
        kind, offset = entry.kind, entry.offset
        size = num_bytes(kind)
        if not size:
            return torch.empty(kind.shape, dtype=kind.dtype)[part]
        data = file.piece(offset, size)
        # A tensor can begin at any offset in the file, but the address of a value must be a multiple of its size.
        data = data if data.data_ptr() % kind.dtype.itemsize == 0 else data.clone()
        return data.view(kind.dtype).view(kind.shape)[part]


def read_config(directory: Path) -> ModelConfig:
    """Return the configuration from config.json and generation_config.json in `directory`.

    Raises UnsupportedModelError, ModelFileError or OSError.
    """
    fields = _config_json(directory)
    ends = end_tokens(ModelDirectory(directory), dict(fields.values))
    return config_from_hf(fields.values, ends=ends, where=fields.where)


def _config_json(directory: Path) -> Fields:
    path = directory / "config.json"
    file = ModelDirectory(directory).file("config.json")
    if file is None:
        raise ModelFileError(f"{path} is missing: complete the directory")
    return Fields(file.read_json(), where=str(path))


def _names(stored: Collection[str], *, has_other_parts: bool) -> dict[str, str]:
    """Return a map from names in the files to the names that transformers uses, for all tensors of the text model.

    has_other_parts: whether the model is multimodal, so that tensors without the text model's prefix are of its other
                     parts, such as the encoder of images.
    """
    prefixes = [prefix for prefix in _TEXT_PREFIXES if prefix + _EMBEDDING in stored]
    prefixes += [name.removesuffix(_EMBEDDING) for name in stored if name.endswith(f".{_EMBEDDING}")]
    is_clear = prefixes and (prefixes[0] in _TEXT_PREFIXES or len(prefixes) == 1)
    prefix = prefixes[0] if is_clear else "model."
    names = {}
    for name in stored:
        if _IGNORED.fullmatch(name):
            continue
        if name.endswith(_HEAD):
            names[name] = _HEAD
        elif name.startswith(prefix):
            names[name] = "model." + name.removeprefix(prefix)
        elif not has_other_parts:
            names[name] = name
    return names


def _says_untied(values: Fields) -> bool:
    """Return whether config.json itself, not the family's default, unties the output head from the embedding."""
    return any(part.get("tie_word_embeddings") is False for part in (values, values.below("text_config")))


def _files(directory: ModelDirectory) -> list[ModelFile]:
    """Return model.safetensors, as transformers does, because the directory may have other formats of the same weights.

    If the directory has no such file, return the files that the index lists or, without an index, all .safetensors
    files.
    """
    single, index = directory.file(_SINGLE_FILE), directory.file(INDEX_FILE)
    if single is not None:
        return [single]
    if index is None:
        return directory.files(".safetensors")
    data = index.read_bytes(MAX_INDEX_BYTES)
    listed = parse_json(data, where=str(index.path), elements=MAX_INDEX_ELEMENTS).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ModelFileError(f"{index.path} has no weight_map of tensor names to file names: write it again")
    named = sorted(set(listed.values()))
    files = [directory.file(name) for name in named]
    missing = [name for name, file in zip(named, files, strict=True) if file is None]
    if missing:
        raise ModelFileError(
            f"{index.path} names {len(named)} files, {len(missing)} are missing, the first is {escaped(missing[0])}: "
            "complete the directory"
        )
    return [file for file in files if file is not None]


def read_header(
    stored: ModelFile, dtypes: Mapping[str, torch.dtype] = DTYPES
) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Return the descriptions of a file's tensors by name, and the file's metadata.

    Raises UnsupportedModelError, which names a type that is not in `dtypes`; ModelFileError, also for a tensor outside
    the file; or OSError.
    """
    path = stored.path
    with stored.open() as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_SIZE_BYTES), "little")
        if size < _SIZE_BYTES or length > min(size - _SIZE_BYTES, MAX_INDEX_BYTES):
            raise ModelFileError(
                f"{path} is cut short or no safetensors file: it has {size} bytes, its header alone asks for {length}"
            )
        header = parse_json(file.read(length), where=f"the header of {path}", elements=MAX_INDEX_ELEMENTS)
    metadata = header.pop("__metadata__", None)
    entries = {}
    for name, fields in header.items():
        kind, offset = _place(fields, dtypes, where=f"tensor {shown(name)} of {path}")
        end = _SIZE_BYTES + length + offset + num_bytes(kind)
        if end > size:
            raise ModelFileError(
                f"{path} is cut short: tensor {shown(name)} ends at byte {end}, the file has {size}: fetch it again"
            )
        entries[name] = StoredTensor(kind, _SIZE_BYTES + length + offset)
    return entries, metadata if isinstance(metadata, dict) else {}


def _place(fields: object, dtypes: Mapping[str, torch.dtype], *, where: str) -> tuple[TensorKind, int]:
    """Return the type and shape of a tensor, and the offset of its first byte from the end of the header.

    fields: the description of the tensor in the header.
    """
    fields = fields if isinstance(fields, dict) else {}
    dtype = fields.get("dtype")
    try:
        shape, (start, stop) = size_of(fields.get("shape")), size_of(fields.get("data_offsets"))
        if not isinstance(dtype, str):
            raise ValueError(f"{shown(dtype)} is not a dtype")
    except ValueError as error:
        raise ModelFileError(
            f"{where} needs a dtype, a shape of at most {MAX_AXES} whole numbers and two data_offsets in its header: "
            "write the file again"
        ) from error
    if dtype not in dtypes:
        raise UnsupportedModelError(f"{where} has type {escaped(dtype)}: supported are {', '.join(dtypes)}")
    kind = TensorKind(shape, dtypes[dtype])
    if stop - start != num_bytes(kind):
        raise ModelFileError(
            f"{where} has {stop - start} bytes, its shape {kind.shape} in {dtype} asks for {num_bytes(kind)}"
        )
    return kind, start


def write_safetensors(
    kinds: Mapping[str, TensorKind],
    directory: Path,
    *,
    read: Callable[[str], torch.Tensor],
    written: Callable[[int], None],
    file_bytes: int = _FILE_BYTES,
) -> None:
    """Write tensors to `directory`, as model.safetensors or as several files with an index.

    kinds:      name, shape and type of each tensor, in the order of writing.
    read:       returns the tensor with a name. Only one tensor at a time is in memory.
    written:    called after each tensor, with the number of bytes of the tensor.
    file_bytes: maximum size of a file. A tensor that would exceed the maximum begins a new file.
    """
    parts: list[dict[str, TensorKind]] = [{}]
    size = 0
    for key, kind in kinds.items():
        if parts[-1] and size + num_bytes(kind) > file_bytes:
            parts.append({})
            size = 0
        parts[-1][key] = kind
        size += num_bytes(kind)
    names = [_SINGLE_FILE]
    if len(parts) > 1:
        names = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        write_file(directory / name, part, read=read, written=written)
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(map(num_bytes, kinds.values()))},
            "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part},
        }
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def write_file(
    path: Path,
    kinds: Mapping[str, TensorKind],
    *,
    read: Callable[[str], torch.Tensor],
    written: Callable[[int], None] = lambda count: None,
    dtypes: Mapping[str, torch.dtype] = DTYPES,
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt"}),
) -> None:
    """Write tensors to one file, one at a time. kinds, read, written: as for write_safetensors()."""
    with path.open("wb") as file:
        pending = bytearray(_header(kinds, dtypes, metadata))
        for key in kinds:
            values = read(key).contiguous().view(-1).view(torch.uint8)
            # Each piece begins at a multiple of the large page size, so that ext4 and XFS cache the file in large
            # pages.
            for piece in values.split(_LARGE_PAGE):
                pending += piece.numpy().data
                if len(pending) >= _LARGE_PAGE:
                    file.write(pending[:_LARGE_PAGE])
                    del pending[:_LARGE_PAGE]
            written(values.numel())
        file.write(pending)


def num_bytes(kind: TensorKind) -> int:
    """Return the size of a tensor's values in bytes."""
    return prod(kind.shape) * kind.dtype.itemsize


def _header(kinds: Mapping[str, TensorKind], dtypes: Mapping[str, torch.dtype], metadata: Mapping[str, str]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    type_names = {dtype: name for name, dtype in dtypes.items()}
    at = 0
    for name, kind in kinds.items():
        start, at = at, at + num_bytes(kind)
        fields[name] = {"dtype": type_names[kind.dtype], "shape": list(kind.shape), "data_offsets": [start, at]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(_SIZE_BYTES + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
