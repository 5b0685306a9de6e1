"""Qwen2 (arXiv:2407.10671) has a bias of q, k and v. Qwen3 (arXiv:2505.09388) has norms of q and k instead."""

from __future__ import annotations

from typing import Any

from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.families.base import (
    LLAMA_NAMES,
    QK_NORM_NAMES,
    Family,
    Fields,
    Traits,
    layer_types,
    mixture,
    sliding_traits,
    window_everywhere,
)

_BIAS_NAMES = {f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"}
_EXPERT_NAMES = {
    "router": "mlp.gate.weight",
    "experts.gate": "mlp.experts.{expert}.gate_proj.weight",
    "experts.up": "mlp.experts.{expert}.up_proj.weight",
    "experts.down": "mlp.experts.{expert}.down_proj.weight",
}


def _window(fields: Fields) -> Traits:
    """Return the window of the layers from `max_window_layers` on, if the model uses it."""
    if not fields.flag("use_sliding_window"):
        return {}
    layers, first = fields.size("num_hidden_layers"), fields.whole("max_window_layers", 28)
    return sliding_traits(fields, is_local=[layer >= first for layer in range(layers)])


def _window_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {"use_sliding_window": config.sliding is not None, **layer_types(config)}


def _qwen3_moe_of_hf(fields: Fields) -> Traits:
    every = fields.size("decoder_sparse_step", 1)
    listed = set(fields.listed("mlp_only_layers", int))
    layers = range(fields.size("num_hidden_layers"))
    moe = mixture(
        fields,
        # transformers 5 names the field num_local_experts.
        "num_experts" if "num_experts" in fields.values else "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        normalize=fields.flag("norm_topk_prob"),
        dense_layers=tuple(layer for layer in layers if layer in listed or (layer + 1) % every),
    )
    window = window_everywhere(fields) if fields.flag("use_sliding_window") else {}
    return {"qk_norm": True, **moe, **window}


def _qwen3_moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None
    return {
        **_window_to_hf(config),
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
        "moe_intermediate_size": config.moe.intermediate_size,
        "norm_topk_prob": config.moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.moe.dense_layers),
    }


def _qwen3_moe_of_gguf(fields: Fields) -> Traits:
    # The converter rejects models with dense layers, and every released model normalizes.
    moe = mixture(fields, "expert_count", "expert_used_count", "expert_feed_forward_length")
    return {"qk_norm": True, **moe}


QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    gguf_architecture="qwen2",
    layer_names={**LLAMA_NAMES, **_BIAS_NAMES},
    from_hf=lambda fields: {"qkv_bias": True, **_window(fields)},
    to_hf=_window_to_hf,
    from_gguf=lambda fields: {"qkv_bias": True},
)
QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    gguf_architecture="qwen3",
    layer_names={**LLAMA_NAMES, **QK_NORM_NAMES},
    unsupported=("attention_bias",),
    from_hf=lambda fields: {"qk_norm": True, **_window(fields)},
    to_hf=_window_to_hf,
    from_gguf=lambda fields: {"qk_norm": True},
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    gguf_architecture="qwen3moe",
    layer_names={**LLAMA_NAMES, **QK_NORM_NAMES, **_EXPERT_NAMES},
    unsupported=("attention_bias",),
    from_hf=_qwen3_moe_of_hf,
    to_hf=_qwen3_moe_to_hf,
    from_gguf=_qwen3_moe_of_gguf,
    is_mixture=True,
)
