"""The supported model families: their tensor names, and how config.json and GGUF files describe their configurations.

To add a family, add a `Family` with its names and traits to `FAMILIES`, and an example to `CONFIGS` of
tests/support/random_checkpoint.py. The tests of families run for each example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_runtime.models.config import ModelConfig, MoEConfig, SlidingWindow, UnsupportedModelError, YarnScaling
from megatron_runtime.models.config_fields import (
    GGUF_OTHERS,
    MAX_ALL_EXPERTS,
    OTHERS,
    Fields,
    Traits,
    is_local_by_period,
    layer_types,
    longest_sequence,
    rope_of_gguf,
    rope_of_hf,
    rope_to_hf,
    sliding_traits,
    window_everywhere,
    windows_of_gguf,
)
from megatron_runtime.protocol.text import shown

_GLOBAL_NAMES = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family.

    name:              `model_type` in transformers.
    architecture:      name of the model class in transformers.
    gguf_architecture: `general.architecture` in GGUF files; None for a family whose files identify themselves as Llama.
    gguf_field:        metadata key that the family's GGUF files have. If a later family in FAMILIES has the same
                       gguf_architecture, the files of the later family lack this key.
    layer_names:       map from the short name of a layer's tensor to the name in transformers; `{expert}` stands for a
                       number.
    activation_field:  name of the field of config.json for the activation, and the field's only supported value.
    unsupported:       fields of config.json that must be absent, null or false.
    traits:            fields of ModelConfig that have the same value in all models of the family.
    from_hf, to_hf:    functions that read other fields of ModelConfig from config.json, and that write these fields.
    text_defaults:     values of the configuration class in transformers. config.json of a multimodal model can leave
                       out the fields of its text part that have these values.
    from_gguf:         function that reads other fields of ModelConfig from the metadata of a GGUF file. The keys have
                       no architecture prefix.
    tied:              whether the output head shares the embedding table if config.json does not state this.
    rope_theta:        rotary base if the file states none.
    pairs_rotary_rows: whether, in GGUF files, the two rows of q and k that rotate together are adjacent.
    expert_fields:     map like _FIELDS for the sizes in MoEConfig; empty for a family without experts.
    """

    name: str
    architecture: str
    layer_names: Mapping[str, str]
    activation_field: tuple[str, str] = ("hidden_act", "silu")
    unsupported: tuple[str, ...] = ()
    traits: Traits = field(default_factory=dict)
    from_hf: Callable[[Fields], Traits] = lambda fields: {}
    to_hf: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    from_gguf: Callable[[Fields], Traits] = lambda fields: {}
    gguf_architecture: str | None = None
    gguf_field: str | None = None
    tied: bool = False
    rope_theta: float = 10000.0
    pairs_rotary_rows: bool = False
    expert_fields: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def base_architecture(self) -> str:
        """Name of the model class without a head in transformers, as embedding models have it."""
        return self.architecture.replace("ForCausalLM", "Model")

    def hf_name(self, name: str) -> str:
        """Return the transformers name of the tensor with the short name `name`."""
        if name in _GLOBAL_NAMES:
            return _GLOBAL_NAMES[name]
        _, layer, own = name.split(".", 2)
        expert = ""
        if own.startswith("experts."):
            _, expert, own = own.split(".")
            own = f"experts.{own}"
        return f"model.layers.{layer}.{self.layer_names[own].format(expert=expert)}"


# --- Llama, Mistral, Mixtral ------------------------------------------------------------------------------------------

_DEFAULTS = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
_LLAMA_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_MIXTRAL_FIELDS = {
    "num_experts": ("num_local_experts", "expert_count"),
    "experts_per_token": ("num_experts_per_tok", "expert_used_count"),
    "intermediate_size": ("intermediate_size", "feed_forward_length"),
}
_MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate.weight",
    "experts.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "experts.up": "block_sparse_moe.experts.{expert}.w3.weight",
    "experts.down": "block_sparse_moe.experts.{expert}.w2.weight",
}


# Touvron et al. 2023, arXiv:2302.13971; also SmolLM2 and Llama 3.
_LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    gguf_architecture="llama",
    layer_names=_LLAMA_NAMES,
    unsupported=("attention_bias", "mlp_bias"),
    text_defaults={**_DEFAULTS, "vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    pairs_rotary_rows=True,
)
# A Llama with a sliding window.
_MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    layer_names=_LLAMA_NAMES,
    # Without the field, transformers uses this window. null means no window.
    from_hf=lambda fields: window_everywhere(Fields({"sliding_window": 4096, **fields.values}, where=fields.where)),
    to_hf=layer_types,
    text_defaults={
        **_DEFAULTS,
        "vocab_size": 32_000,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
)
# A Mistral whose feed-forward is a mixture of experts (Jiang et al. 2024, arXiv:2401.04088).
_MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    gguf_architecture="llama",
    layer_names={**_LLAMA_NAMES, **_MIXTRAL_NAMES},
    from_hf=lambda fields: {**window_everywhere(fields), "moe": _experts(fields, _hf(_MIXTRAL_FIELDS))},
    to_hf=layer_types,
    rope_theta=1_000_000.0,
    pairs_rotary_rows=True,
    expert_fields=_MIXTRAL_FIELDS,
)

# --- Qwen -------------------------------------------------------------------------------------------------------------

_QK_NORM_NAMES = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
_QWEN_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
_QWEN_EXPERT_FIELDS = {
    "num_experts": ("num_experts", "expert_count"),
    "experts_per_token": ("num_experts_per_tok", "expert_used_count"),
    "intermediate_size": ("moe_intermediate_size", "expert_feed_forward_length"),
}
_QWEN_EXPERT_NAMES = {
    "router": "mlp.gate.weight",
    "experts.gate": "mlp.experts.{expert}.gate_proj.weight",
    "experts.up": "mlp.experts.{expert}.up_proj.weight",
    "experts.down": "mlp.experts.{expert}.down_proj.weight",
}


def _qwen_window(fields: Fields) -> Traits:
    """Return the ModelConfig field `sliding` of a Qwen model, or no field if no layer has a sliding window.

    Only the layers from `max_window_layers` on have a window.
    """
    if not fields.flag("use_sliding_window"):
        return {}
    key = "max_window_layers"
    first = 0 if fields.get(key) == 0 else fields.size(key, 28)
    return sliding_traits(fields, is_local=[layer >= first for layer in range(fields.size("num_hidden_layers"))])


def _qwen_window_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {"use_sliding_window": config.sliding is not None, **layer_types(config)}


def _qwen3_moe_of_hf(fields: Fields) -> Traits:
    every = fields.size("decoder_sparse_step", 1)
    listed = set(fields.listed("mlp_only_layers", int))
    layers = range(fields.size("num_hidden_layers"))
    names = _hf(_QWEN_EXPERT_FIELDS)
    if "num_experts" not in fields.values:
        names["num_experts"] = "num_local_experts"  # its name in transformers 5
    moe = _experts(
        fields,
        names,
        normalize=fields.flag("norm_topk_prob"),
        dense_layers=tuple(layer for layer in layers if layer in listed or (layer + 1) % every),
    )
    window = window_everywhere(fields) if fields.flag("use_sliding_window") else {}
    return {"moe": moe, **window}


def _qwen3_moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    assert config.moe is not None
    return {
        **_qwen_window_to_hf(config),
        "norm_topk_prob": config.moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.moe.dense_layers),
    }


# arXiv:2407.10671. It has a bias of q, k and v.
_QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    gguf_architecture="qwen2",
    layer_names={**_LLAMA_NAMES, **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"}},
    traits={"qkv_bias": True},
    from_hf=_qwen_window,
    to_hf=_qwen_window_to_hf,
    text_defaults=_QWEN_DEFAULTS,
)
# arXiv:2505.09388. It has norms of q and k.
_QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    gguf_architecture="qwen3",
    layer_names={**_LLAMA_NAMES, **_QK_NORM_NAMES},
    unsupported=("attention_bias",),
    traits={"qk_norm": True},
    from_hf=_qwen_window,
    to_hf=_qwen_window_to_hf,
    text_defaults={**_QWEN_DEFAULTS, "head_dim": 128},
)
_QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    gguf_architecture="qwen3moe",
    layer_names={**_LLAMA_NAMES, **_QK_NORM_NAMES, **_QWEN_EXPERT_NAMES},
    unsupported=("attention_bias",),
    traits={"qk_norm": True},
    from_hf=_qwen3_moe_of_hf,
    to_hf=_qwen3_moe_to_hf,
    expert_fields=_QWEN_EXPERT_FIELDS,
)

# --- Gemma 3 ----------------------------------------------------------------------------------------------------------

_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_PERIOD = 6
_GEMMA_NAMES = {
    **_LLAMA_NAMES,
    **_QK_NORM_NAMES,
    "attention_output_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_output_norm": "post_feedforward_layernorm.weight",
}


def _local_theta(fields: Fields, default: float) -> float:
    """Return the rotary base of local layers, which have no scaling.

    transformers 5 writes this base next to the base of the other layers.

    default: base for files of transformers 4.
    """
    rope = fields.below("rope_parameters").below("sliding_attention")
    rope.only("rope_type", "default")
    return rope.constant("rope_theta", default)


def _rope_by_layer(config: ModelConfig) -> dict[str, Any]:
    """Return the rotary fields of local layers and of the other layers, in the format of transformers 5."""
    scaling = rope_to_hf(config)["rope_scaling"] or {"rope_type": "default"}
    local_theta = config.rope_theta if config.sliding is None else config.sliding.rope_theta
    return {
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": config.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        }
    }


def _gemma_of_hf(fields: Fields) -> Traits:
    theta = _local_theta(fields, fields.constant("rope_local_base_freq", _GEMMA_LOCAL_THETA))
    key = "sliding_window_pattern" if fields.get("sliding_window_pattern") else "_sliding_window_pattern"
    is_local = is_local_by_period(fields.size("num_hidden_layers"), fields.size(key, _GEMMA_PERIOD))
    return {
        "embedding_scale": fields.size("hidden_size") ** 0.5,
        "query_scale": fields.constant("query_pre_attn_scalar", 256) ** -0.5,
        **sliding_traits(fields, is_local=is_local, rope_theta=theta),
    }


def _gemma_to_hf(config: ModelConfig) -> dict[str, Any]:
    rope = _rope_by_layer(config)
    return {
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "rope_local_base_freq": rope["rope_parameters"]["sliding_attention"]["rope_theta"],
        **rope,
        **layer_types(config),
    }


def _gemma_of_gguf(fields: Fields) -> Traits:
    layers, hidden = fields.size("block_count"), fields.size("embedding_length")
    heads = fields.size("attention.head_count")
    # Only the largest model divides q·k by the hidden size per head; the file has no field for this.
    per_head = hidden // heads if layers == 62 else fields.size("attention.key_length")
    sliding = windows_of_gguf(
        fields,
        is_local=is_local_by_period(layers, _GEMMA_PERIOD),
        rope_theta=fields.constant("rope.freq_base_swa", _GEMMA_LOCAL_THETA),
    )
    return {"embedding_scale": hidden**0.5, "query_scale": per_head**-0.5, **sliding}


# The text model (Gemma Team 2025, arXiv:2503.19786). The embeddings are scaled. Norms precede and follow each block,
# and files store the norm weights minus one. Five of every six layers have a sliding window and their own rotary
# frequencies.
_GEMMA3 = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    gguf_architecture="gemma3",
    layer_names=_GEMMA_NAMES,
    activation_field=("hidden_activation", "gelu_pytorch_tanh"),
    unsupported=(
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ),
    traits={"qk_norm": True, "output_norms": True, "norm_weight_offset": 1.0, "activation": "gelu_tanh"},
    from_hf=_gemma_of_hf,
    to_hf=_gemma_to_hf,
    text_defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "bos_token_id": 2,
    },
    from_gguf=_gemma_of_gguf,
    tied=True,
    rope_theta=1_000_000.0,
)

# --- Phi-3, Granite, SmolLM3 ------------------------------------------------------------------------------------------


_NO_PADDING = {"pad_token_id": None}
"""Fields of config.json without a padding token. transformers' default is a token of one particular vocabulary."""


def _granite_of_hf(fields: Fields) -> Traits:
    """Return fields of ModelConfig for an equivalent decoder whose layers add their outputs without a factor.

    A norm cancels any factor of the hidden states, except in the norm's epsilon. So the factor of the layers' outputs
    can be moved to the embeddings and to epsilon.
    """
    residual = fields.constant("residual_multiplier", 1.0)
    return {
        "embedding_scale": fields.constant("embedding_multiplier", 1.0) / residual,
        "query_scale": fields.constant("attention_multiplier", 1.0),
        "logit_scale": 1.0 / fields.constant("logits_scaling", 1.0),
        "rms_norm_eps": fields.constant("rms_norm_eps") / residual**2,
    }


def _granite_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": config.attention_scale,
        "logits_scaling": 1.0 / config.logit_scale,
        "residual_multiplier": 1.0,
    }


def _granite_of_gguf(fields: Fields) -> Traits:
    residual = fields.constant("residual_scale", 1.0)
    return {
        "embedding_scale": fields.constant("embedding_scale", 1.0) / residual,
        "query_scale": fields.constant("attention.scale", 1.0),
        "logit_scale": 1.0 / fields.constant("logit_scale", 1.0),
        "rms_norm_eps": fields.constant("attention.layer_norm_rms_epsilon") / residual**2,
    }


_NOPE_PERIOD = 4


def _smollm3_traits(rotates: list[bool], length: int) -> Traits:
    # Describe the layers without rotation as local layers with a window that covers every position.
    is_local = tuple(not each for each in rotates)
    return {"sliding": SlidingWindow(window=length, is_local=is_local, rotates=False)} if any(is_local) else {}


def _smollm3_of_hf(fields: Fields) -> Traits:
    layers, length = fields.size("num_hidden_layers"), fields.size("max_position_embeddings")
    key = "no_rope_layers"
    listed = fields.listed(key, int)
    period = fields.size("no_rope_layer_interval", _NOPE_PERIOD)
    rotates = [bool(each) for each in listed] if listed else is_local_by_period(layers, period)
    if len(rotates) != layers:
        raise UnsupportedModelError(f"{fields.where} has {key} of {len(rotates)} layers: want {layers}")
    return _smollm3_traits(rotates, length)


def _smollm3_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {**_NO_PADDING, "no_rope_layers": [int(not config.is_local(layer)) for layer in range(config.num_layers)]}


# arXiv:2404.14219: a Mistral with fused matrices.
_PHI3 = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    gguf_architecture="phi3",
    layer_names={
        **_LLAMA_NAMES,
        "qkv": "self_attn.qkv_proj.weight",
        "gate_up": "mlp.gate_up_proj.weight",
    },
    traits={"fused": True},
    from_hf=window_everywhere,
    to_hf=lambda config: {**_NO_PADDING, **layer_types(config)},
    from_gguf=lambda fields: windows_of_gguf(fields, is_local=[True] * fields.size("block_count")),
)
# A Llama whose embeddings, scores, outputs of layers and logits have factors.
_GRANITE = Family(
    name="granite",
    architecture="GraniteForCausalLM",
    gguf_architecture="granite",
    layer_names=_LLAMA_NAMES,
    unsupported=("attention_bias", "mlp_bias"),
    from_hf=_granite_of_hf,
    to_hf=_granite_to_hf,
    from_gguf=_granite_of_gguf,
    pairs_rotary_rows=True,
)
# A Llama in which every fourth layer does not rotate (Kazemnejad et al. 2023, arXiv:2305.19466).
_SMOLLM3 = Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    gguf_architecture="smollm3",
    layer_names=_LLAMA_NAMES,
    unsupported=("attention_bias", "mlp_bias", "use_sliding_window"),
    from_hf=_smollm3_of_hf,
    to_hf=_smollm3_to_hf,
    from_gguf=lambda fields: _smollm3_traits(
        is_local_by_period(fields.size("block_count"), _NOPE_PERIOD), fields.size("context_length")
    ),
    tied=True,
    pairs_rotary_rows=True,
)

# --- OLMo 2 and 3 -----------------------------------------------------------------------------------------------------

_OLMO_PERIOD = 4
_OLMO3_THETA = 500_000.0
_OLMO_NAMES = {
    **{name: own for name, own in _LLAMA_NAMES.items() if name not in ("attention_norm", "mlp_norm")},
    **_QK_NORM_NAMES,
    "attention_output_norm": "post_attention_layernorm.weight",
    "mlp_output_norm": "post_feedforward_layernorm.weight",
}
_OLMO_TRAITS = {"qk_norm": True, "joint_qk_norm": True, "input_norms": False, "output_norms": True}


def _olmo3_of_hf(fields: Fields) -> Traits:
    # transformers writes every field, but uses these values for files that lack one.
    fields = Fields({"sliding_window": 4096, **fields.values}, where=fields.where)
    whole_theta = rope_of_hf(fields, theta=_OLMO3_THETA)["rope_theta"]
    is_local = is_local_by_period(fields.size("num_hidden_layers"), _OLMO_PERIOD)
    return sliding_traits(fields, is_local=is_local, rope_theta=_local_theta(fields, whole_theta))


def _olmo3_of_gguf(fields: Fields) -> Traits:
    base = fields.constant("rope.freq_base", _OLMO3_THETA)
    traits = windows_of_gguf(
        fields,
        is_local=is_local_by_period(fields.size("block_count"), _OLMO_PERIOD),
        rope_theta=fields.constant("rope.freq_base_swa", base),
    )
    scaling = rope_of_gguf(fields, theta=base)["rope_scaling"]
    if isinstance(scaling, YarnScaling) and fields.get("rope.scaling.attn_factor") is not None:
        # In files of this family, the field contains the whole attention factor of transformers. In files of other
        # families, the field contains an additional factor.
        attention = fields.constant("rope.scaling.attn_factor")
        traits["rope_scaling"] = replace(scaling, attention_factor=attention)
    return traits


# arXiv:2501.00656. Norms follow attention and feed-forward instead of preceding them. The norms of q and k cover all
# heads.
_OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    gguf_architecture="olmo2",
    layer_names=_OLMO_NAMES,
    unsupported=("attention_bias",),
    traits=_OLMO_TRAITS,
)
# An OLMo 2 in which three of four layers have a sliding window and no rope scaling (arXiv:2512.13961).
_OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    gguf_architecture="olmo2",
    gguf_field="attention.sliding_window",
    layer_names=_OLMO_NAMES,
    unsupported=("attention_bias",),
    traits=_OLMO_TRAITS,
    from_hf=_olmo3_of_hf,
    to_hf=lambda config: {**_rope_by_layer(config), **layer_types(config)},
    from_gguf=_olmo3_of_gguf,
    rope_theta=_OLMO3_THETA,
)

# --- all families -----------------------------------------------------------------------------------------------------

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        _LLAMA,
        _MISTRAL,
        _MIXTRAL,
        _QWEN2,
        _QWEN3,
        _QWEN3_MOE,
        _GEMMA3,
        _PHI3,
        _GRANITE,
        _SMOLLM3,
        _OLMO3,
        _OLMO2,
    )
}
GGUF_ARCHITECTURES = tuple(
    dict.fromkeys(family.gguf_architecture for family in FAMILIES.values() if family.gguf_architecture is not None)
)
_FIELDS = {
    "hidden_size": ("hidden_size", "embedding_length"),
    "intermediate_size": ("intermediate_size", "feed_forward_length"),
    "num_layers": ("num_hidden_layers", "block_count"),
    "num_heads": ("num_attention_heads", "attention.head_count"),
    "num_kv_heads": ("num_key_value_heads", "attention.head_count_kv"),
    "head_dim": ("head_dim", "attention.key_length"),
    "rms_norm_eps": ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    "max_position_embeddings": ("max_position_embeddings", "context_length"),
}
"""The field of config.json and the field of a GGUF file for each field of ModelConfig."""


def config_from_hf(values: Mapping[str, Any], *, ends: tuple[int, ...], where: str) -> ModelConfig:
    """Return the configuration that a config.json of transformers describes.

    values: content of config.json.
    ends:   token ids that end an answer.
    where:  the origin of `values`, for messages.

    Raises UnsupportedModelError if the model is not supported. The error names the field, its value and the supported
    values.
    """
    family, fields = _family_of_hf(Fields(values, where=where))
    fields.only("partial_rotary_factor", 1.0)
    fields.require_causal("is_causal", remedy=OTHERS)
    fields.only(*family.activation_field)
    for name in family.unsupported:
        fields.only(name)
    traits = family.from_hf(fields) | rope_of_hf(fields, theta=family.rope_theta)
    return _config(
        family,
        fields,
        _hf(_FIELDS),
        vocab_size=fields.size("vocab_size"),
        tie_embeddings=fields.flag("tie_word_embeddings", family.tied),
        eos_token_ids=ends,
        bos_token_id=fields.token("bos_token_id"),
        **traits,
    )


def _family_of_hf(fields: Fields) -> tuple[Family, Fields]:
    """Return the family and the fields of the text model. Of a multimodal model, only the text model runs."""
    architectures = fields.listed("architectures", str)
    for family in FAMILIES.values():
        is_base = family.base_architecture in architectures or not architectures
        if family.architecture in architectures or (is_base and family.name == fields.get("model_type")):
            return family, fields
    text = fields.below("text_config")
    for family in FAMILIES.values():
        if family.name == text.get("model_type") or family.architecture in text.listed("architectures", str):
            shared = ("tie_word_embeddings", "bos_token_id")
            whole = {key: fields.get(key) for key in shared if fields.get(key) is not None}
            return family, Fields({**family.text_defaults, **whole, **text.values}, where=text.where)
    supported = ", ".join(one.architecture for one in FAMILIES.values())
    named = ", ".join(map(shown, architectures[:4]))
    raise UnsupportedModelError(f"{fields.where} has architectures [{named}]: supported are {supported}; {OTHERS}")


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config.json with which transformers constructs the model that `config` describes."""
    family = FAMILIES[config.family]
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        family.activation_field[0]: family.activation_field[1],
        "vocab_size": config.vocab_size,
        **{hf: getattr(config, ours) for ours, hf in _hf(_FIELDS).items()},
        **{hf: getattr(config.moe, ours) for ours, hf in _hf(family.expert_fields).items()},
        **rope_to_hf(config),
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
        **family.to_hf(config),
    }


def family_of_gguf(architecture: object, fields: Fields) -> Family:
    """Return the family of a GGUF file. architecture: its `general.architecture`. fields: as for config_from_gguf().

    Raises UnsupportedModelError if the architecture is not supported. The error names the supported architectures.
    """
    is_mixture = bool(fields.get("expert_count", 0))
    for family in FAMILIES.values():
        is_same = family.gguf_architecture == architecture and bool(family.expert_fields) == is_mixture
        if architecture is not None and is_same and (family.gguf_field is None or fields.get(family.gguf_field)):
            return family
    kind = f"architecture {shown(architecture)}" + (" with experts" if is_mixture else "")
    supported = ", ".join(GGUF_ARCHITECTURES)
    raise UnsupportedModelError(f"{fields.where} has {kind}: supported are {supported}; {GGUF_OTHERS}")


def config_from_gguf(
    family: Family,
    fields: Fields,
    *,
    vocab_size: int,
    tie_embeddings: bool,
    ends: tuple[int, ...],
    bos: int | None,
) -> ModelConfig:
    """Return the configuration that the metadata of a GGUF file describes.

    fields: the metadata whose keys begin with the architecture's name. In `fields`, the keys lack this prefix.

    Raises UnsupportedModelError if a value is not supported.
    """
    fields.require_causal("attention.causal", remedy=GGUF_OTHERS)
    traits = rope_of_gguf(fields, theta=family.rope_theta) | family.from_gguf(fields)
    if family.expert_fields:
        # The GGUF converter rejects models with dense layers, and every released model normalizes its weights.
        traits["moe"] = _experts(fields, _gguf(family.expert_fields))
    names = _gguf(_FIELDS)
    if not fields.get("feed_forward_length"):
        names["intermediate_size"] = "expert_feed_forward_length"
    config = _config(
        family,
        fields,
        names,
        vocab_size=vocab_size,
        tie_embeddings=tie_embeddings,
        eos_token_ids=ends,
        bos_token_id=bos,
        **traits,
    )
    if fields.get("rope.dimension_count", config.head_dim) != config.head_dim:
        raise UnsupportedModelError(
            f"{fields.where} rotates a part of each head: supported are whole heads; {GGUF_OTHERS}"
        )
    return config


def _hf(fields: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    return {ours: hf for ours, (hf, _) in fields.items()}


def _gguf(fields: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    return {ours: gguf for ours, (_, gguf) in fields.items()}


def _experts(fields: Fields, names: Mapping[str, str], *, normalize: bool = True, **others: Any) -> MoEConfig:
    sizes: dict[str, Any] = {ours: fields.size(name) for ours, name in names.items()}
    return MoEConfig(**sizes, normalize=normalize, **others)


def _config(family: Family, fields: Fields, names: Mapping[str, str], **others: Any) -> ModelConfig:
    """Return a configuration with the sizes from `fields`.

    names: for each size, the name of its field in the file.

    Raises UnsupportedModelError if the sizes contradict each other or are not supported.
    """
    hidden, heads = fields.size(names["hidden_size"]), fields.size(names["num_heads"])
    for name in ("intermediate_size", "num_layers"):
        others[name] = fields.size(names[name])
    longest = longest_sequence(fields.size(names["max_position_embeddings"]), others["rope_scaling"])
    config = ModelConfig(
        family=family.name,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.size(names["num_kv_heads"], heads),
        head_dim=fields.size(names["head_dim"], hidden // heads),
        max_position_embeddings=longest,
        **{"rms_norm_eps": fields.constant(names["rms_norm_eps"]), **family.traits, **others},
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
