"""The text model of Gemma 3 (Gemma Team 2025, arXiv:2503.19786).

It has norms before and after each block, whose weights are stored minus one, and scaled embeddings. Five of every six
layers have a sliding window and their own rotary frequencies.
"""

from __future__ import annotations

from typing import Any

from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.families.base import (
    LLAMA_NAMES,
    QK_NORM_NAMES,
    Family,
    Fields,
    Traits,
    layer_types,
    rope_to_hf,
    sliding_traits,
)

_LOCAL_THETA = 10_000.0
_PERIOD = 6
_NAMES = {
    **LLAMA_NAMES,
    **QK_NORM_NAMES,
    "attention_output_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_output_norm": "post_feedforward_layernorm.weight",
}


def _common(hidden_size: int) -> Traits:
    return {
        "qk_norm": True,
        "output_norms": True,
        "norm_weight_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_scale": hidden_size**0.5,
    }


def _is_local(num_layers: int, period: int) -> list[bool]:
    return [bool((layer + 1) % period) for layer in range(num_layers)]


def _of_hf(fields: Fields) -> Traits:
    # transformers 5 keeps the rotation of local layers beside the other, version 4 had a field for its base.
    rope = fields.below("rope_parameters").below("sliding_attention")
    local = fields.constant("rope_local_base_freq", _LOCAL_THETA)
    theta = rope.constant("rope_theta", local) if rope.get("rope_theta") else local
    period = fields.size(
        "sliding_window_pattern" if fields.get("sliding_window_pattern") else "_sliding_window_pattern", _PERIOD
    )
    return {
        **_common(fields.size("hidden_size")),
        "query_scale": fields.constant("query_pre_attn_scalar", 256) ** -0.5,
        **sliding_traits(fields, is_local=_is_local(fields.size("num_hidden_layers"), period), rope_theta=theta),
    }


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    rope = rope_to_hf(config)
    scaling = rope["rope_scaling"] or {"rope_type": "default"}
    local_theta = config.rope_theta if config.sliding is None else config.sliding.rope_theta
    return {
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "rope_local_base_freq": local_theta,
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": config.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        **layer_types(config),
    }


def _of_gguf(fields: Fields) -> Traits:
    layers, hidden = fields.size("block_count"), fields.size("embedding_length")
    heads = fields.size("attention.head_count")
    # Only the largest model divides by the hidden size per head; the file has no field for it.
    per_head = hidden // heads if layers == 62 else fields.size("attention.key_length")
    # A period, or whether each layer is local.
    name = "attention.sliding_window_pattern"
    is_list = isinstance(fields.get(name), list)
    if is_list and len(fields.listed(name, bool)) != layers:
        raise UnsupportedModelError(f"{fields.where} has {name} of {len(fields.get(name))} layers: want {layers}")
    sliding = sliding_traits(
        Fields({"sliding_window": fields.get("attention.sliding_window")}, where=fields.where),
        is_local=fields.listed(name, bool) if is_list else _is_local(layers, fields.size(name, _PERIOD)),
        rope_theta=fields.constant("rope.freq_base_swa", _LOCAL_THETA),
    )
    return {**_common(hidden), "query_scale": per_head**-0.5, **sliding}


GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    gguf_architecture="gemma3",
    layer_names=_NAMES,
    activation_field=("hidden_activation", "gelu_pytorch_tanh"),
    unsupported=(
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ),
    from_hf=_of_hf,
    to_hf=_to_hf,
    from_gguf=_of_gguf,
    tied=True,
    rope_theta=1_000_000.0,
)
