"""The supported families of models, and how their configurations are read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.families.base import MAX_ALL_EXPERTS, Family, Fields, rope_of_gguf, rope_of_hf, rope_to_hf
from megatron_runtime.models.families.gemma import GEMMA3
from megatron_runtime.models.families.llama import LLAMA, MISTRAL, MIXTRAL
from megatron_runtime.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from megatron_runtime.protocol.text import shown

FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA3)
}
GGUF_ARCHITECTURES = tuple(
    dict.fromkeys(family.gguf_architecture for family in FAMILIES.values() if family.gguf_architecture is not None)
)
_HF_NAMES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
}
_GGUF_NAMES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
"""Field of ModelConfig -> field of the file."""


def config_from_hf(values: Mapping[str, Any], *, ends: tuple[int, ...], where: str) -> ModelConfig:
    """Return the configuration that transformers writes as `values` (config.json).

    ends:  token ids that end an answer.
    where: the origin of `values`, for messages.

    Raises UnsupportedModelError naming the field, its value and what is supported.
    """
    fields = Fields(values, where=where)
    architectures = fields.listed("architectures", str)
    family = next((one for one in FAMILIES.values() if one.architecture in architectures), None)
    if family is None:
        supported = ", ".join(one.architecture for one in FAMILIES.values())
        named = ", ".join(map(shown, architectures[:4]))
        raise UnsupportedModelError(f"{where} has architectures [{named}]: supported are {supported}")
    fields.only("partial_rotary_factor", 1.0)
    fields.only(*family.activation_field)
    for name in family.unsupported:
        fields.only(name)
    traits = family.from_hf(fields)
    theta, scaling = rope_of_hf(fields, theta=family.rope_theta)
    return _config(
        fields,
        _HF_NAMES,
        family=family.name,
        vocab_size=fields.size("vocab_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=fields.flag("tie_word_embeddings", family.tied),
        eos_token_ids=ends,
        bos_token_id=fields.token("bos_token_id"),
        **traits,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json for transformers."""
    family = FAMILIES[config.family]
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        family.activation_field[0]: family.activation_field[1],
        "vocab_size": config.vocab_size,
        **{theirs: getattr(config, ours) for ours, theirs in _HF_NAMES.items()},
        **rope_to_hf(config),
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
        **family.to_hf(config),
    }


def family_of_gguf(architecture: object, *, is_mixture: bool, where: str) -> Family:
    """Return the family of a GGUF file. Raises UnsupportedModelError naming the architecture and those supported."""
    for family in FAMILIES.values():
        if architecture is not None and (family.gguf_architecture, family.is_mixture) == (architecture, is_mixture):
            return family
    kind = f"architecture {shown(architecture)}" + (" with experts" if is_mixture else "")
    raise UnsupportedModelError(f"{where} holds {kind}: supported are {', '.join(GGUF_ARCHITECTURES)}")


def config_from_gguf(
    family: Family,
    fields: Fields,
    *,
    vocab_size: int,
    tie_embeddings: bool,
    ends: tuple[int, ...],
    bos: int | None,
) -> ModelConfig:
    """Return the configuration in the metadata of a GGUF file.

    fields: the metadata under the architecture's prefix, without the prefix.

    Raises UnsupportedModelError.
    """
    theta, scaling = rope_of_gguf(fields, theta=family.rope_theta)
    size = "feed_forward_length" if fields.get("feed_forward_length") else "expert_feed_forward_length"
    config = _config(
        fields,
        _GGUF_NAMES | {"intermediate_size": size},
        family=family.name,
        vocab_size=vocab_size,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=tie_embeddings,
        eos_token_ids=ends,
        bos_token_id=bos,
        **family.from_gguf(fields),
    )
    if fields.get("rope.dimension_count", config.head_dim) != config.head_dim:
        raise UnsupportedModelError(f"{fields.where} rotates a part of each head: whole heads are supported")
    return config


def _config(fields: Fields, names: Mapping[str, str], **others: Any) -> ModelConfig:
    hidden, heads = fields.size(names["hidden_size"]), fields.size(names["num_heads"])
    others |= {
        name: fields.size(names[name]) for name in ("intermediate_size", "num_layers", "max_position_embeddings")
    }
    config = ModelConfig(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.size(names["num_kv_heads"], heads),
        head_dim=fields.size(names["head_dim"], hidden // heads),
        rms_norm_eps=fields.constant(names["rms_norm_eps"]),
        **others,
    )
    where, moe = fields.where, config.moe
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedModelError(
            f"{where} has {config.num_heads} query heads and {config.num_kv_heads} key-value heads: want a multiple"
        )
    if config.head_dim % 2:
        raise UnsupportedModelError(f"{where} has heads of {config.head_dim}: rotary pairs want an even number")
    if moe is not None and config.num_layers * moe.num_experts > MAX_ALL_EXPERTS:
        raise UnsupportedModelError(
            f"{where} has {config.num_layers} layers of {moe.num_experts} experts: at most {MAX_ALL_EXPERTS} "
            "experts are supported in all"
        )
    if moe is not None and moe.experts_per_token > moe.num_experts:
        raise UnsupportedModelError(f"{where} sends each token to {moe.experts_per_token} of {moe.num_experts} experts")
    return config
