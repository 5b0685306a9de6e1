"""Llama weights from a GGUF file, dequantised.

llama.cpp stores the rows of Q and K so that rotary pairs lie side by side; they are put back as transformers has them.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_runtime.loading.checkpoint import UnsupportedModelError
from megatron_runtime.models.llama_config import LlamaConfig
from megatron_runtime.tokenization.gguf_metadata import GGUFFormatError, GGUFTensorInfo, read_gguf_index

_F32, _F16, _Q4_0, _Q4_1, _Q8_0, _BF16 = 0, 1, 2, 3, 8, 30

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_METADATA_KEYS = (
    "general.architecture",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.expert_count",
    "llama.feed_forward_length",
    "llama.rope.dimension_count",
    "llama.rope.freq_base",
    "llama.rope.scaling.type",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
)


class GGUFCheckpoint:
    """A Llama in a .gguf file. Making one reads the headers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        metadata, self._index = read_gguf_index(path, keys=_METADATA_KEYS)
        self._names = {info.name: _transformers_name(info.name) for info in self._index}
        unknown = [name for name, known in self._names.items() if known is None]
        if metadata.get("general.architecture") != "llama":
            raise UnsupportedModelError(
                f"{path} holds architecture {metadata.get('general.architecture')!r}: supported is 'llama'"
            )
        if unknown:
            raise UnsupportedModelError(f"{path} holds tensors that a Llama has not: {', '.join(unknown[:8])}")
        self.config = self._read_config(metadata)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (transformers name, float32 tensor); F16 and BF16 tensors keep their type."""
        heads = {"attn_q.weight": self.config.num_heads, "attn_k.weight": self.config.num_kv_heads}
        with (
            self._path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view,
        ):
            for info in self._index:
                tensor = _dequantise(_raw_bytes(view, info, self._path), info, self._path)
                for suffix, num_heads in heads.items():
                    if info.name.endswith(suffix):
                        tensor = _unpair_rotary_rows(tensor, num_heads)
                name = self._names[info.name]
                assert name is not None
                yield name, tensor

    def _read_config(self, metadata: dict[str, Any]) -> LlamaConfig:
        def required(key: str) -> Any:
            if key not in metadata:
                raise UnsupportedModelError(f"{self._path} has no metadata key {key!r}, which a Llama needs")
            return metadata[key]

        hidden, heads = required("llama.embedding_length"), required("llama.attention.head_count")
        head_dim = metadata.get("llama.attention.key_length", hidden // heads)
        if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
            raise UnsupportedModelError(f"{self._path} rotates a part of each head: whole heads are supported")
        if metadata.get("llama.rope.scaling.type", "none") != "none":
            kind = metadata["llama.rope.scaling.type"]
            raise UnsupportedModelError(f"{self._path} has rope scaling {kind!r}: none is supported in GGUF files")
        if metadata.get("llama.expert_count", 0):
            raise UnsupportedModelError(f"{self._path} is a mixture of experts: dense models are supported")
        shapes = {info.name: info.shape for info in self._index}
        if "token_embd.weight" not in shapes:
            raise UnsupportedModelError(f"{self._path} has no tensor 'token_embd.weight', which a Llama needs")
        ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        return LlamaConfig(
            vocab_size=shapes["token_embd.weight"][0],
            hidden_size=hidden,
            intermediate_size=required("llama.feed_forward_length"),
            num_layers=required("llama.block_count"),
            num_heads=heads,
            num_kv_heads=metadata.get("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=required("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=metadata.get("llama.rope.freq_base", 10000.0),
            max_position_embeddings=required("llama.context_length"),
            tie_embeddings="output.weight" not in shapes,
            eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        )


def _transformers_name(name: str) -> str | None:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}"


def _unpair_rotary_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 2:]) - 8) * _half(blocks[:, :2])


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks[:, :2])).add_(_half(blocks[:, 2:4]))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8) * _half(blocks[:, :2])


def _half(two_bytes: torch.Tensor) -> torch.Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low halves first, then high halves: a block of 32 values lies in 16 bytes."""
    return torch.cat((packed & 15, packed >> 4), dim=1).float()


# GGML type number -> (values in a block, bytes of a block, blocks as rows of uint8 -> values as rows).
_BLOCK_FORMATS: dict[int, tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    _F32: (1, 4, lambda blocks: blocks.view(torch.float32).clone()),
    _F16: (1, 2, lambda blocks: blocks.view(torch.float16).clone()),
    _BF16: (1, 2, lambda blocks: blocks.view(torch.bfloat16).clone()),
    _Q4_0: (32, 18, _q4_0),
    _Q4_1: (32, 20, _q4_1),
    _Q8_0: (32, 34, _q8_0),
}


def _block_sizes(info: GGUFTensorInfo, path: Path) -> tuple[int, int]:
    if info.kind in _BLOCK_FORMATS:
        values, size, _ = _BLOCK_FORMATS[info.kind]
        return values, size
    import gguf

    try:
        return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.kind)]
    except (KeyError, ValueError) as error:
        raise UnsupportedModelError(f"tensor {info.name!r} of {path} has unknown type {info.kind}") from error


def _raw_bytes(view: mmap.mmap, info: GGUFTensorInfo, path: Path) -> torch.Tensor:
    """The tensor's blocks as rows of bytes, without copying them."""
    values, size = _block_sizes(info, path)
    count = 1
    for extent in info.shape:
        count *= extent
    if not info.shape or info.shape[-1] % values:
        raise GGUFFormatError(f"tensor {info.name!r} of {path} has shape {info.shape}: rows of {values} expected")
    num_bytes = count // values * size
    if info.offset + num_bytes > len(view):
        raise GGUFFormatError(f"{path} is cut short: tensor {info.name!r} ends beyond it")
    return torch.frombuffer(view, dtype=torch.uint8, count=num_bytes, offset=info.offset).view(-1, size)


def _dequantise(blocks: torch.Tensor, info: GGUFTensorInfo, path: Path) -> torch.Tensor:
    if info.kind in _BLOCK_FORMATS:
        return _BLOCK_FORMATS[info.kind][2](blocks).view(info.shape)
    import gguf

    kind = gguf.GGMLQuantizationType(info.kind)
    try:
        values = gguf.quants.dequantize(blocks.numpy().reshape(info.shape[0], -1), kind)
    except NotImplementedError as error:
        raise UnsupportedModelError(f"tensor {info.name!r} of {path} has unsupported type {kind.name}") from error
    return torch.from_numpy(values).reshape(info.shape)
