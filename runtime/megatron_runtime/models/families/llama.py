"""Llama (Touvron et al. 2023, arXiv:2302.13971; SmolLM2, Llama 3), Mistral and Mixtral.

Mistral is a Llama with a sliding window. Mixtral (Jiang et al. 2024, arXiv:2401.04088) is a Mistral whose feed-forward
is a mixture of experts.
"""

from __future__ import annotations

from typing import Any

from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.families.base import (
    LLAMA_NAMES,
    Family,
    Fields,
    Traits,
    layer_types,
    mixture,
    window_everywhere,
)

_EXPERT_NAMES = {
    "router": "block_sparse_moe.gate.weight",
    "experts.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "experts.up": "block_sparse_moe.experts.{expert}.w3.weight",
    "experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
}


def _mixtral_of_hf(fields: Fields) -> Traits:
    moe = mixture(fields, "num_local_experts", "num_experts_per_tok", "intermediate_size")
    return {**window_everywhere(fields), **moe}


def _mixtral_to_hf(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None
    return {
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
        **layer_types(config),
    }


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    gguf_architecture="llama",
    layer_names=LLAMA_NAMES,
    unsupported=("attention_bias", "mlp_bias"),
    pairs_rotary_rows=True,
)
MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    layer_names=LLAMA_NAMES,
    from_hf=window_everywhere,
    to_hf=layer_types,
)
MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    gguf_architecture="llama",
    layer_names={**LLAMA_NAMES, **_EXPERT_NAMES},
    from_hf=_mixtral_of_hf,
    to_hf=_mixtral_to_hf,
    from_gguf=lambda fields: mixture(fields, "expert_count", "expert_used_count", "feed_forward_length"),
    rope_theta=1_000_000.0,
    pairs_rotary_rows=True,
    is_mixture=True,
)
