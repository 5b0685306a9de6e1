"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): a Mistral whose feed-forward is a mixture of experts."""

from __future__ import annotations

from typing import Any

from megatron_runtime.models.config import ModelConfig, MoEConfig
from megatron_runtime.models.families.base import (
    LLAMA_NAMES,
    Family,
    Fields,
    Traits,
    layer_types,
    window_everywhere,
)

_EXPERT_NAMES = {
    "router": "block_sparse_moe.gate.weight",
    "experts.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "experts.up": "block_sparse_moe.experts.{expert}.w3.weight",
    "experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
}


def _of_hf(fields: Fields) -> Traits:
    fields.only("hidden_act", "silu")
    moe = MoEConfig(
        num_experts=fields.size("num_local_experts"),
        experts_per_token=fields.size("num_experts_per_tok"),
        intermediate_size=fields.size("intermediate_size"),
        normalize=True,
    )
    return {"moe": moe, **window_everywhere(fields)}


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None
    return {
        "hidden_act": "silu",
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
        **layer_types(config),
    }


def _of_gguf(fields: Fields) -> Traits:
    moe = MoEConfig(
        num_experts=fields.size("expert_count"),
        experts_per_token=fields.size("expert_used_count"),
        intermediate_size=fields.size("feed_forward_length"),
        normalize=True,
    )
    return {"moe": moe}


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    gguf_architecture="llama",
    layer_names={**LLAMA_NAMES, **_EXPERT_NAMES},
    from_hf=_of_hf,
    to_hf=_to_hf,
    from_gguf=_of_gguf,
    rope_theta=1_000_000.0,
    pairs_rotary_rows=True,
    is_mixture=True,
)
