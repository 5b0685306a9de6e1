"""Read weights from a GGUF file, quantized as they are stored or dequantized.

Tensors are returned as transformers has them. llama.cpp stores some differently: the rows of q and k of some families
are in the order of rotary pairs, the experts of a layer are one tensor, and weights of norms include their offset.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from megatron_kernels.quantized import BLOCK_SIZES, KIND_NAMES, PLAIN_DTYPES, QuantizedTensor, dequantize
from megatron_runtime.checkpoints.gguf_metadata import GGUFTensorInfo, read_gguf_header
from megatron_runtime.checkpoints.mapped import MappedFile
from megatron_runtime.checkpoints.model_files import ModelFile, ModelFileError
from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.config_fields import Fields, scaling_of_factors
from megatron_runtime.models.families import Family, config_from_gguf, family_of_gguf
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind
from megatron_runtime.protocol.text import escaped, shown

_FACTORS = "rope_freqs.weight"
_GLOBAL_NAMES = {"token_embd.weight": "embedding", "output_norm.weight": "norm", "output.weight": "head"}
_LAYER_NAMES = {
    "attn_norm.weight": "attention_norm",
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
    """The place of one tensor in the file.

    paired_heads: number of heads, if the rows of each are in the order of rotary pairs; else None.
    less:         to be subtracted from the values.
    """

    kind: int
    shape: tuple[int, ...]
    offset: int
    paired_heads: int | None = None
    less: float = 0.0


class GGUFCheckpoint(Checkpoint):
    """The weights in a .gguf file. The constructor reads the header."""

    def __init__(self, path: Path) -> None:
        file = ModelFile(path)
        self._file = MappedFile(file)
        metadata, index = read_gguf_header(path, vocabulary=False)
        _require_whole(path, index, file.status().st_size)
        infos = {info.name: info for info in index}
        architecture = metadata.get("general.architecture")
        prefix = f"{architecture}."
        fields = Fields(
            {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)},
            where=str(path),
        )
        family = family_of_gguf(architecture, is_mixture=bool(fields.get("expert_count", 0)), where=str(path))
        if "token_embd.weight" not in infos:
            raise UnsupportedModelError(f"{path} has no tensor 'token_embd.weight', which every model needs")
        tokens = Fields(metadata, where=str(path))
        ends = (tokens.token(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        config = config_from_gguf(
            family,
            fields,
            vocab_size=infos["token_embd.weight"].shape[0],
            tie_embeddings="output.weight" not in infos,
            ends=tuple(dict.fromkeys(end for end in ends if end is not None)),
            bos=tokens.token("tokenizer.ggml.bos_token_id"),
        )
        self.config = self._with_factors(config, infos.get(_FACTORS))
        self._entries = dict(_entries(index, family, self.config, path))
        self.kinds = {
            name: TensorKind(entry.shape, PLAIN_DTYPES.get(entry.kind, torch.float32))
            for name, entry in self._entries.items()
        }

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """Return float32 values; F16 and BF16 tensors keep their type."""
        entry = self._entries[name]
        if len(entry.shape) == 1:
            values = self._whole(entry)
            return (values - entry.less if entry.less else values)[part]
        rows = self._rows(entry, part[:1])
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
        rows = self._rows(entry, part[:1])
        whole = QuantizedTensor(entry.kind, (len(rows), entry.shape[1]), rows)
        return whole.columns(part[1]) if len(part) > 1 else whole

    def _with_factors(self, config: ModelConfig, info: GGUFTensorInfo | None) -> ModelConfig:
        """Return `config` with the rope scaling in tensor `info` of the file, if there is one."""
        if info is None:
            return config
        if info.shape != (config.head_dim // 2,) or info.kind not in PLAIN_DTYPES:
            raise UnsupportedModelError(
                f"tensor {_FACTORS!r} of {self._file.file.path} has shape {info.shape} and type number {info.kind}: "
                f"want one value for each of {config.head_dim // 2} pairs"
            )
        factors, where = self._whole(info).tolist(), str(self._file.file.path)
        scaling = scaling_of_factors(factors, theta=config.rope_theta, head_dim=config.head_dim, where=where)
        return replace(config, rope_scaling=scaling)

    def _whole(self, place: _Entry | GGUFTensorInfo) -> torch.Tensor:
        """Return the values of a tensor as they are stored."""
        data = self._file.piece(place.offset, _num_bytes(place.kind, place.shape))
        return dequantize(place.kind, data, place.shape)

    def _rows(self, entry: _Entry, part: Part) -> torch.Tensor:
        """Return the blocks of some rows, uint8 [rows, bytes per row], in the order of transformers."""
        count, row_bytes = entry.shape[0], _num_bytes(entry.kind, entry.shape[1:])
        start, stop, _ = (part or (slice(None),))[0].indices(count)
        if entry.paired_heads is None:
            return self._file.piece(entry.offset + start * row_bytes, (stop - start) * row_bytes).view(-1, row_bytes)
        order = torch.arange(count).view(entry.paired_heads, -1, 2).transpose(1, 2).reshape(-1)
        return self._file.piece(entry.offset, count * row_bytes).view(count, row_bytes)[order[start:stop]]


def _num_bytes(kind: int, shape: tuple[int, ...]) -> int:
    values, size = BLOCK_SIZES[kind]
    return prod(shape) // values * size


def _entries(
    index: tuple[GGUFTensorInfo, ...], family: Family, config: ModelConfig, path: Path
) -> Iterator[tuple[str, _Entry]]:
    """Yield the tensors by their names in transformers; the experts of a layer are one tensor in the file."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if family.pairs_rotary_rows else {}
    unknown = []
    for info in index:
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", info.name)
        layer = f"layers.{match[1]}." if match else ""
        short = _LAYER_NAMES.get(match[2]) if match else _GLOBAL_NAMES.get(info.name)
        if info.name == _FACTORS:
            continue
        if short is None or (layer and short not in family.layer_names):
            unknown.append(info.name)
        elif short.startswith("experts."):
            if config.moe is None or info.shape[0] != config.moe.num_experts:
                raise UnsupportedModelError(
                    f"tensor {shown(info.name)} of {path} has shape {info.shape}: the model has "
                    f"{config.moe.num_experts if config.moe else 0} experts a layer"
                )
            shape = info.shape[1:]
            for expert in range(info.shape[0]):
                name = family.hf_name(layer + short.replace("experts.", f"experts.{expert}."))
                yield name, _Entry(info.kind, shape, info.offset + expert * _num_bytes(info.kind, shape))
        else:
            less = config.norm_weight_offset if short.endswith("norm") else 0.0
            entry = _Entry(info.kind, info.shape, info.offset, paired_heads=heads.get(short), less=less)
            yield family.hf_name(layer + short), entry
    if unknown:
        raise UnsupportedModelError(
            f"{path} has tensors that {family.architecture} does not have: "
            f"{', '.join(map(escaped, sorted(unknown)[:8]))}"
        )


def _require_whole(path: Path, index: tuple[GGUFTensorInfo, ...], size: int) -> None:
    """Raise an error unless every tensor is unique, of a known type, in whole blocks and inside the file."""
    names: set[str] = set()
    for info in index:
        if info.name in names:
            raise ModelFileError(f"{path} has tensor {shown(info.name)} twice: write the file again")
        names.add(info.name)
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
