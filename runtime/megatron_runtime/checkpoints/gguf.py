"""Reads weights from a GGUF file, either in their stored quantized form or dequantized.

Tensors are returned in the layout of transformers. The layout of GGUF files differs from it: in some model families,
the rows of q and k are in the order of rotary pairs, the experts of a layer are one tensor, and the weights of norms
include their offset.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_kernels.quantized import BLOCK_SIZES, KIND_NAMES, PLAIN_DTYPES, QuantizedTensor, dequantize
from megatron_runtime.checkpoints.gguf_metadata import GGUFTensorInfo, gguf_parts, read_gguf_header
from megatron_runtime.checkpoints.mapped import MappedFile
from megatron_runtime.checkpoints.model_files import ModelDirectory, ModelFile, ModelFileError
from megatron_runtime.models.config import ModelConfig, RopeScaling, UnsupportedModelError
from megatron_runtime.models.config_fields import GGUF_OTHERS, Fields, long_rope, scaling_of_factors
from megatron_runtime.models.families import Family, config_from_gguf, family_of_gguf
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind
from megatron_runtime.protocol.text import escaped, shown

_FACTORS = "rope_freqs.weight"
_LONG_ROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
_GLOBAL_NAMES = {"token_embd.weight": "embedding", "output_norm.weight": "norm", "output.weight": "head"}
_LAYER_NAMES = {
    "attn_norm.weight": "attention_norm",
    "attn_qkv.weight": "qkv",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "attn_output.weight": "output",
    "post_attention_norm.weight": "attention_output_norm",
    "ffn_norm.weight": "mlp_norm",
    "post_ffw_norm.weight": "mlp_output_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "ffn_gate_inp.weight": "router",
    "ffn_gate_exps.weight": "experts.gate",
    "ffn_up_exps.weight": "experts.up",
    "ffn_down_exps.weight": "experts.down",
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """The description of one tensor, and its place in the file.

    offset:       position in bytes, from the start of the file.
    paired_heads: number of heads if the rows of each head are in the order of rotary pairs; otherwise None.
    less:         value that read() subtracts, because the file stores the weights of a norm with this value added.
    """

    file: MappedFile
    kind: int
    shape: tuple[int, ...]
    offset: int
    paired_heads: int | None = None
    less: float = 0.0


class GGUFCheckpoint(Checkpoint):
    """A checkpoint in a .gguf file, or in several .gguf files that are the parts of one model.

    The constructor reads the headers.

    path: path of the file, or of any part.
    """

    def __init__(self, path: Path) -> None:
        path, *others = gguf_parts(path)
        metadata, stored = _read_files(path, others)
        architecture = metadata.get("general.architecture")
        prefix = f"{architecture}."
        fields = Fields(
            {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)},
            where=str(path),
        )
        family = family_of_gguf(architecture, fields)
        if "token_embd.weight" not in stored:
            raise UnsupportedModelError(f"{path} has no tensor 'token_embd.weight', which every model needs")
        tokens = Fields(metadata, where=str(path))
        ends = (tokens.token(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        config = config_from_gguf(
            family,
            fields,
            vocab_size=stored["token_embd.weight"].shape[0],
            tie_embeddings="output.weight" not in stored,
            ends=tuple(dict.fromkeys(end for end in ends if end is not None)),
            bos=tokens.token("tokenizer.ggml.bos_token_id"),
        )
        self.config = _with_factors(config, fields, stored)
        self._entries = dict(_entries(stored, family, self.config, path))
        self.kinds = {
            name: TensorKind(entry.shape, PLAIN_DTYPES.get(entry.kind, torch.float32))
            for name, entry in self._entries.items()
        }

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """Return the values of a tensor, or of a part of the tensor.

        F16 and BF16 tensors keep their type, and all other tensors are returned as float32.
        """
        entry = self._entries[name]
        if len(entry.shape) == 1:
            values = _whole(entry)
            return (values - entry.less if entry.less else values)[part]
        rows = _rows(entry, part[:1])
        values = dequantize(entry.kind, rows, (len(rows), entry.shape[1]))
        return values[:, part[1]] if len(part) > 1 else values

    def blocks(self, name: str, part: Part = (), *, wanted: Container[int]) -> QuantizedTensor | None:
        entry = self._entries[name]
        if entry.kind in PLAIN_DTYPES or entry.kind not in wanted or len(entry.shape) != 2:
            return None
        if len(part) > 1:
            start, stop, _ = part[1].indices(entry.shape[1])
            values = BLOCK_SIZES[entry.kind][0]
            if start % values or stop % values:
                return None
        rows = _rows(entry, part[:1])
        whole = QuantizedTensor(entry.kind, (len(rows), entry.shape[1]), rows)
        return whole.columns(part[1]) if len(part) > 1 else whole


def _read_files(path: Path, others: Sequence[Path]) -> tuple[dict[str, Any], dict[str, _Entry]]:
    """Return the metadata of the file at `path`, and the tensors of `path` and `others` by their GGUF names."""
    metadata: dict[str, Any] = {}
    stored: dict[str, _Entry] = {}
    directory = ModelDirectory(path.parent)
    for each in (path, *others):
        file = ModelFile(each) if each == path else directory.file(each.name)
        if file is None:
            raise ModelFileError(f"{each} is missing: the model has {1 + len(others)} files, complete the directory")
        header, index = read_gguf_header(each, vocabulary=False)
        metadata = metadata or header
        count = header.get("split.count") or 1
        if count != 1 + len(others):
            raise ModelFileError(
                f"{each} is one of {count} files of a model, but its name says that there are {1 + len(others)}: "
                "name them as they were published, NAME-00001-of-00002.gguf"
            )
        mapped = MappedFile(file)
        for info in _whole_tensors(each, index, file.status().st_size):
            if info.name in stored:
                raise ModelFileError(f"{each} has tensor {shown(info.name)} twice: write the file again")
            stored[info.name] = _Entry(mapped, info.kind, info.shape, info.offset)
    return metadata, stored


def _with_factors(config: ModelConfig, fields: Fields, stored: Mapping[str, _Entry]) -> ModelConfig:
    """Return `config` with the rope scaling factors that the file stores as tensors, if there are any."""
    where = fields.where

    def factors(name: str) -> list[float]:
        entry = stored.get(name)
        if entry is None:
            raise UnsupportedModelError(
                f"{where} has rope scaling 'longrope' and no tensor {name!r}: convert the model again"
            )
        if entry.shape != (config.head_dim // 2,) or entry.kind not in PLAIN_DTYPES:
            raise UnsupportedModelError(
                f"tensor {name!r} of {where} has shape {entry.shape} and type number {entry.kind}: "
                f"want one value for each of {config.head_dim // 2} pairs"
            )
        values: list[float] = _whole(entry).tolist()
        return values

    if _FACTORS in stored:
        scaling: RopeScaling = scaling_of_factors(
            factors(_FACTORS), theta=config.rope_theta, head_dim=config.head_dim, where=where
        )
        return replace(config, rope_scaling=scaling)
    # Files of Phi-3 contain the factors but do not name the scaling.
    is_long = fields.get("rope.scaling.type") == "longrope" or not stored.keys().isdisjoint(_LONG_ROPE)
    if not is_long:
        return config
    key = "rope.scaling.original_context_length"
    if fields.get(key) is None:
        raise UnsupportedModelError(
            f"{where} has rope scaling 'longrope' and no field {key!r}, the length up to which the short factors "
            "apply: convert the model again"
        )
    original, attention = fields.size(key), "rope.scaling.attn_factor"
    scaling = long_rope(
        *map(factors, _LONG_ROPE),
        original=original,
        factor=fields.constant("rope.scaling.factor", fields.size("context_length") / original),
        head_dim=config.head_dim,
        attention_factor=None if fields.get(attention) is None else fields.constant(attention),
        where=where,
    )
    return replace(config, rope_scaling=scaling)


def _whole(entry: _Entry) -> torch.Tensor:
    """Return the dequantized values of a whole tensor, with the rows in the order of the file."""
    data = entry.file.piece(entry.offset, _num_bytes(entry.kind, entry.shape))
    return dequantize(entry.kind, data, entry.shape)


def _rows(entry: _Entry, part: Part) -> torch.Tensor:
    """Return the quantized blocks of the rows in `part`, uint8 [rows, bytes per row].

    The rows are in the order of transformers.
    """
    count, row_bytes = entry.shape[0], _num_bytes(entry.kind, entry.shape[1:])
    start, stop, _ = (part or (slice(None),))[0].indices(count)
    if entry.paired_heads is None:
        return entry.file.piece(entry.offset + start * row_bytes, (stop - start) * row_bytes).view(-1, row_bytes)
    order = torch.arange(count).view(entry.paired_heads, -1, 2).transpose(1, 2).reshape(-1)
    return entry.file.piece(entry.offset, count * row_bytes).view(count, row_bytes)[order[start:stop]]


def _num_bytes(kind: int, shape: tuple[int, ...]) -> int:
    values, size = BLOCK_SIZES[kind]
    return prod(shape) // values * size


def _entries(
    stored: Mapping[str, _Entry], family: Family, config: ModelConfig, path: Path
) -> Iterator[tuple[str, _Entry]]:
    """Yield the tensors with their transformers names.

    The experts of a layer are one tensor in the file. Each expert is yielded as a separate tensor.
    """
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if family.pairs_rotary_rows else {}
    unknown = []
    for own_name, entry in stored.items():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", own_name)
        layer = f"layers.{match[1]}." if match else ""
        short = _LAYER_NAMES.get(match[2]) if match else _GLOBAL_NAMES.get(own_name)
        if own_name in (_FACTORS, *_LONG_ROPE):
            continue
        if short == "up" and config.fused:
            short = "gate_up"
        if short is None or (layer and short not in family.layer_names):
            unknown.append(own_name)
        elif short.startswith("experts."):
            if config.moe is None or entry.shape[0] != config.moe.num_experts:
                raise UnsupportedModelError(
                    f"tensor {shown(own_name)} of {path} has shape {entry.shape}: the model has "
                    f"{config.moe.num_experts if config.moe else 0} experts a layer"
                )
            shape = entry.shape[1:]
            for expert in range(entry.shape[0]):
                name = family.hf_name(layer + short.replace("experts.", f"experts.{expert}."))
                offset = entry.offset + expert * _num_bytes(entry.kind, shape)
                yield name, replace(entry, shape=shape, offset=offset)
        else:
            less = config.norm_weight_offset if short.endswith("norm") else 0.0
            yield family.hf_name(layer + short), replace(entry, paired_heads=heads.get(short), less=less)
    if unknown:
        raise UnsupportedModelError(
            f"{path} has tensors that {family.architecture} does not have: "
            f"{', '.join(map(escaped, sorted(unknown)[:8]))}; {GGUF_OTHERS}"
        )


def _whole_tensors(path: Path, index: tuple[GGUFTensorInfo, ...], size: int) -> Iterator[GGUFTensorInfo]:
    """Yield the tensors of a file.

    Raises an error unless each tensor has a known type, consists of whole blocks and is within the file.
    """
    for info in index:
        if info.kind not in BLOCK_SIZES:
            raise UnsupportedModelError(
                f"tensor {shown(info.name)} of {path} has type number {info.kind}: supported are "
                f"{', '.join(KIND_NAMES.values())}"
            )
        values = BLOCK_SIZES[info.kind][0]
        if not info.shape or info.shape[-1] % values or not all(info.shape):
            raise ModelFileError(
                f"tensor {shown(info.name)} of {path} has shape {info.shape}: rows of {values} expected"
            )
        end = info.offset + _num_bytes(info.kind, info.shape)
        if end > size:
            raise ModelFileError(
                f"{path} is cut short: tensor {shown(info.name)} ends at byte {end}, the file has {size}: "
                "fetch it again"
            )
        yield info
