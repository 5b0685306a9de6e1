"""Llama (Touvron et al. 2023, arXiv:2302.13971; SmolLM2, Llama 3), and Mistral, a Llama with a sliding window."""

from __future__ import annotations

from megatron_runtime.models.families.base import (
    LLAMA_NAMES,
    Family,
    Fields,
    Traits,
    layer_types,
    no_traits,
    window_everywhere,
)


def _llama_of_hf(fields: Fields) -> Traits:
    for flag in ("attention_bias", "mlp_bias"):
        fields.only(flag)
    fields.only("hidden_act", "silu")
    return {}


def _mistral_of_hf(fields: Fields) -> Traits:
    fields.only("hidden_act", "silu")
    return window_everywhere(fields)


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    gguf_architecture="llama",
    layer_names=LLAMA_NAMES,
    from_hf=_llama_of_hf,
    to_hf=lambda config: {"hidden_act": "silu"},
    from_gguf=no_traits,
    pairs_rotary_rows=True,
)
MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    layer_names=LLAMA_NAMES,
    from_hf=_mistral_of_hf,
    to_hf=lambda config: {"hidden_act": "silu", **layer_types(config)},
    from_gguf=no_traits,
)
