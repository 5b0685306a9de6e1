"""The families of models that run here, and how their configurations are read and written. One file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.families.base import MAX_ALL_EXPERTS, Family, Fields
from megatron_runtime.models.families.gemma import GEMMA3
from megatron_runtime.models.families.llama import LLAMA, MISTRAL
from megatron_runtime.models.families.mixtral import MIXTRAL
from megatron_runtime.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from megatron_runtime.models.families.rope import rope_of_gguf, rope_of_hf, rope_to_hf
from megatron_runtime.protocol.text import shown

FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA3)
}
GGUF_ARCHITECTURES = tuple(
    dict.fromkeys(family.gguf_architecture for family in FAMILIES.values() if family.gguf_architecture is not None)
)


def config_from_hf(values: Mapping[str, Any], *, ends: tuple[int, ...], where: str) -> ModelConfig:
    """The configuration that transformers writes as `values` (config.json).

    ends:  token ids that end an answer.
    where: what `values` were read from, for messages.

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
    traits = family.from_hf(fields)
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    theta, scaling = rope_of_hf(fields, theta=family.rope_theta)
    config = ModelConfig(
        family=family.name,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=fields.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=fields.size("head_dim", hidden // heads),
        rms_norm_eps=fields.constant("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=fields.size("max_position_embeddings"),
        tie_embeddings=fields.flag("tie_word_embeddings", family.tied),
        eos_token_ids=ends,
        bos_token_id=fields.token("bos_token_id"),
        **traits,
    )
    _require_consistent(config, where)
    return config


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """What transformers reads as config.json."""
    family = FAMILIES[config.family]
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        **rope_to_hf(config),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
        **family.to_hf(config),
    }


def family_of_gguf(architecture: object, *, is_mixture: bool, where: str) -> Family:
    """Raises UnsupportedModelError naming the architecture and those supported."""
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
    """fields: the metadata under the architecture's prefix, without it. Raises UnsupportedModelError."""
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", hidden // heads)
    if fields.get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{fields.where} rotates a part of each head: whole heads are supported")
    theta, scaling = rope_of_gguf(fields, theta=family.rope_theta)
    config = ModelConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.size(
            "feed_forward_length" if fields.get("feed_forward_length") else "expert_feed_forward_length"
        ),
        num_layers=fields.size("block_count"),
        num_heads=heads,
        num_kv_heads=fields.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=fields.constant("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=fields.size("context_length"),
        tie_embeddings=tie_embeddings,
        eos_token_ids=ends,
        bos_token_id=bos,
        **family.from_gguf(fields),
    )
    _require_consistent(config, fields.where)
    return config


def _require_consistent(config: ModelConfig, where: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedModelError(
            f"{where} has {config.num_heads} query heads and {config.num_kv_heads} key-value heads: want a multiple"
        )
    if config.head_dim % 2:
        raise UnsupportedModelError(f"{where} has heads of {config.head_dim}: rotary pairs want an even number")
    if config.moe is not None and config.num_layers * config.moe.num_experts > MAX_ALL_EXPERTS:
        raise UnsupportedModelError(
            f"{where} has {config.num_layers} layers of {config.moe.num_experts} experts: at most {MAX_ALL_EXPERTS} "
            "experts are supported in all"
        )
    if config.moe is not None and config.moe.experts_per_token > config.moe.num_experts:
        raise UnsupportedModelError(
            f"{where} sends each token to {config.moe.experts_per_token} of {config.moe.num_experts} experts"
        )
