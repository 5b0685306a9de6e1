"""Llama weights from a directory as transformers writes it: config.json and *.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_runtime.loading.checkpoint import UnsupportedModelError
from megatron_runtime.models.llama_config import LlamaConfig, RopeScaling

_ARCHITECTURES = ("LlamaForCausalLM",)
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


class SafetensorsCheckpoint:
    """A Llama in a directory. Making one reads config.json."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.config = _read_config(directory)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (transformers name, tensor of the stored type)."""
        for path in sorted(self._directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    if not name.endswith(_IGNORED_SUFFIXES):
                        yield name, file.get_tensor(name)


def _read_config(directory: Path) -> LlamaConfig:
    path = directory / "config.json"
    values: dict[str, Any] = json.loads(path.read_text())
    return parse_config(values, ends=_end_tokens(directory, values), where=str(path))


def parse_config(values: dict[str, Any], *, ends: tuple[int, ...], where: str) -> LlamaConfig:
    """The configuration that transformers writes as `values`. Raises UnsupportedModelError naming the field."""
    architectures = values.get("architectures") or []
    if not set(architectures) & set(_ARCHITECTURES):
        raise UnsupportedModelError(f"{where} has architectures {architectures}: supported is {_ARCHITECTURES[0]}")
    for flag in ("attention_bias", "mlp_bias"):
        if values.get(flag):
            raise UnsupportedModelError(f"{where} sets {flag}: linear layers without bias are supported")
    if values.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"{where} has hidden_act {values['hidden_act']!r}: supported is 'silu'")
    try:
        return _parse(values, ends, where)
    except KeyError as error:
        raise UnsupportedModelError(f"{where} has no field {error}, which a Llama needs") from error


def _parse(values: dict[str, Any], ends: tuple[int, ...], path: str) -> LlamaConfig:
    heads = values["num_attention_heads"]
    # transformers 5 writes rope_parameters where version 4 wrote rope_theta and rope_scaling.
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return LlamaConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        rms_norm_eps=values["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or values.get("rope_theta") or 10000.0,
        max_position_embeddings=values["max_position_embeddings"],
        tie_embeddings=values.get("tie_word_embeddings", False),
        eos_token_ids=ends,
        bos_token_id=values.get("bos_token_id"),
        rope_scaling=_rope_scaling(rope, path),
    )


def _rope_scaling(rope: dict[str, Any], path: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModelError(f"{path} has rope type {kind!r}: supported are 'default' and 'llama3'")
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
    )


def _end_tokens(directory: Path, values: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json knows every token that ends an answer; config.json often only one."""
    path = directory / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    found = generation.get("eos_token_id", values.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)
