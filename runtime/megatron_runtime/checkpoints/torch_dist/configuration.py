"""The configuration of a model in a Megatron-Core checkpoint, from config.json or from the arguments in common.pt.

Arguments are translated to the fields of transformers' config.json, so that a model family reads them like any
config.json.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_runtime.checkpoints.model_files import ModelDirectory, ModelFile
from megatron_runtime.checkpoints.safe_unpickler import ordered_dict, read_pickle
from megatron_runtime.checkpoints.safetensors import read_config as read_config_json
from megatron_runtime.checkpoints.torch_dist.saved_files import saved_archive
from megatron_runtime.models.config import Llama3Scaling, ModelConfig, UnsupportedModelError
from megatron_runtime.models.config_fields import Fields
from megatron_runtime.models.families import config_from_hf
from megatron_runtime.protocol.text import shown

CONFIG_FILE, COMMON_FILE = "config.json", "common.pt"

_TRUSTED: Mapping[tuple[str, str], Any] = {
    ("argparse", "Namespace"): Namespace,
    ("collections", "OrderedDict"): ordered_dict,
}

_ONLY: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False, None),
    "apply_layernorm_1p": (False, None),
    "multi_latent_attention": (False, None),
    "moe_shared_expert_intermediate_size": (None, 0),
    "moe_router_score_function": ("softmax", None),
    "window_size": (None,),
    "mtp_num_layers": (None, 0),
}
"""Arguments that change the model's computation, with the supported values. arguments_of() writes the first value."""

_LLAMA31 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants that Megatron uses with `use_rope_scaling`."""

_NOT_ARGUMENTS = frozenset(("family", "bos_token_id", "eos_token_ids"))
"""Fields of ModelConfig that need no argument.

They do not affect the computation, and tokenizer files list the tokens.
"""

_NEEDED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_position_embeddings")


def read_config(directory: Path) -> ModelConfig:
    """Return the configuration of the model in `directory`.

    config.json in the directory or in its parent takes precedence over the arguments in common.pt.

    Raises UnsupportedModelError, UnsafePickleError or ModelFileError.
    """
    for place in (directory, directory.parent):
        if ModelDirectory(place).file(CONFIG_FILE) is not None:
            return read_config_json(place)
    file = ModelDirectory(directory).file(COMMON_FILE)
    if file is None:
        raise UnsupportedModelError(
            f"{directory} has neither {CONFIG_FILE} nor {COMMON_FILE}: put the model's {CONFIG_FILE} there"
        )
    where = str(file.path)
    return config_from_hf(config_json_of(read_arguments(file), where=where), ends=(), where=where)


def read_arguments(common: ModelFile) -> dict[str, Any]:
    """Return the arguments in common.pt that are scalars or flat lists.

    All other arguments are ignored. The function runs no code from the file.
    """
    path = common.path
    with saved_archive(common, where=str(path)) as archive:
        pickled = archive.pickle()
    # The arguments of a training run contain objects of arbitrary packages. None of these is needed or imported.
    saved = read_pickle(
        pickled, where=str(path), trusted=_TRUSTED, opaque=lambda module, name: True, persistent=lambda pid: None
    )
    arguments = saved.get("args") if isinstance(saved, dict) else None
    if not isinstance(arguments, Namespace):
        raise UnsupportedModelError(f"{path} holds no training arguments: put the model's {CONFIG_FILE} next to")
    return {
        name: value
        for name, value in vars(arguments).items()
        # Nested lists are left out, because they could exceed the memory.
        if (all(map(_is_scalar, value)) if isinstance(value, list | tuple) else _is_scalar(value))
    }


def _is_scalar(value: Any) -> bool:
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    return value is None or isinstance(value, float | str)


def config_json_of(arguments: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the fields of config.json for a model that was trained with `arguments`.

    Raises UnsupportedModelError, which names the argument, its value and the supported value.
    """
    for name, allowed in _ONLY.items():
        if name in arguments and arguments[name] not in allowed:
            raise UnsupportedModelError(
                f"{where} has argument {name} {shown(arguments[name])}: supported is {allowed[0]!r}"
            )
    vocabulary = arguments.get("vocab_size") or arguments.get("padded_vocab_size")
    lacking = [name for name in _NEEDED if arguments.get(name) is None]
    if vocabulary is None:
        lacking.append("vocab_size or padded_vocab_size")
    if lacking:
        raise UnsupportedModelError(
            f"{where} has no argument {', '.join(lacking)}: put the model's config.json next to the checkpoint"
        )
    fields = Fields(arguments, where=where)
    heads = fields.size("num_attention_heads")
    grouped = arguments.get("group_query_attention") and arguments.get("num_query_groups")
    scaling: dict[str, Any] | None = None
    if fields.flag("use_rope_scaling"):
        scaling = {"rope_type": "llama3", "factor": float(fields.constant("rope_scaling_factor", 8.0)), **_LLAMA31}
    return {
        "architectures": [_architecture(arguments, where)],
        "vocab_size": vocabulary,
        "hidden_size": arguments["hidden_size"],
        "intermediate_size": arguments["ffn_hidden_size"],
        "num_hidden_layers": arguments["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": arguments["num_query_groups"] if grouped else heads,
        "head_dim": arguments.get("kv_channels") or fields.size("hidden_size") // heads,
        "hidden_act": "silu",
        "rms_norm_eps": arguments.get("norm_epsilon", arguments.get("layernorm_epsilon", 1e-5)),
        "rope_theta": float(fields.constant("rotary_base", 10000)),
        "rope_scaling": scaling,
        "max_position_embeddings": arguments["max_position_embeddings"],
        "tie_word_embeddings": not fields.flag("untie_embeddings_and_output_weights"),
        **_mixture(fields),
    }


def arguments_of(config: ModelConfig) -> Namespace:
    """Return the Megatron-LM arguments that describe `config`. read_config() can convert them to a ModelConfig.

    Raises UnsupportedModelError, which names the field of ModelConfig that the arguments do not describe.
    """
    scaling = config.rope_scaling
    arguments: dict[str, Any] = {
        **{name: allowed[0] for name, allowed in _ONLY.items()},
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "group_query_attention": config.num_kv_heads != config.num_heads,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "max_position_embeddings": config.max_position_embeddings,
        "seq_length": config.max_position_embeddings,
        "norm_epsilon": config.rms_norm_eps,
        "layernorm_epsilon": config.rms_norm_eps,
        "rotary_base": int(config.rope_theta) if config.rope_theta.is_integer() else config.rope_theta,
        "use_rope_scaling": isinstance(scaling, Llama3Scaling),
        "rope_scaling_factor": scaling.factor if isinstance(scaling, Llama3Scaling) else 8.0,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "untie_embeddings_and_output_weights": not config.tie_embeddings,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
    }
    if config.moe is not None:
        dense = [0 if layer in config.moe.dense_layers else 1 for layer in range(config.num_layers)]
        arguments |= {
            "num_experts": config.moe.num_experts,
            "moe_router_topk": config.moe.experts_per_token,
            "moe_ffn_hidden_size": config.moe.intermediate_size,
            "moe_layer_freq": dense if config.moe.dense_layers else 1,
            "moe_router_pre_softmax": not config.moe.normalize,
            "moe_grouped_gemm": True,
        }
    where = f"a model of family {config.family!r}"
    described = config_from_hf(config_json_of(arguments, where=where), ends=config.eos_token_ids, where=where)
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in _NOT_ARGUMENTS and getattr(described, field.name) != value:
            raise UnsupportedModelError(
                f"{where} cannot be written as torch_dist: Megatron-LM has no argument for {field.name} "
                f"{shown(value)}: convert it to safetensors"
            )
    return Namespace(**arguments)


def _architecture(arguments: Mapping[str, Any], where: str) -> str:
    mixture, bias, norm = (bool(arguments.get(name)) for name in ("num_experts", "add_qkv_bias", "qk_layernorm"))
    fields = {
        (False, False, False): "LlamaForCausalLM",
        (False, True, False): "Qwen2ForCausalLM",
        (False, False, True): "Qwen3ForCausalLM",
        (True, False, False): "MixtralForCausalLM",
        (True, False, True): "Qwen3MoeForCausalLM",
    }.get((mixture, bias, norm))
    if fields is None:
        raise UnsupportedModelError(
            f"{where} has num_experts {shown(arguments.get('num_experts'))}, add_qkv_bias {bias} and "
            f"qk_layernorm {norm}: no family here combines these"
        )
    return fields


def _mixture(fields: Fields) -> dict[str, Any]:
    arguments, where = fields.values, fields.where
    if not arguments.get("num_experts"):
        return {}
    experts, layers = fields.size("num_experts"), fields.size("num_layers")
    size = arguments.get("moe_ffn_hidden_size") or arguments["ffn_hidden_size"]
    frequency = arguments.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        sparse = [bool(flag) for flag in fields.listed("moe_layer_freq", int)]
    else:
        every = fields.size("moe_layer_freq", 1)
        sparse = [layer % every == 0 for layer in range(layers)]
    common = {"num_experts_per_tok": arguments.get("moe_router_topk", 2)}
    # Without this argument, the softmax covers only the selected experts, which is equal to normalising the weights.
    normalised = not arguments.get("moe_router_pre_softmax")
    if not arguments.get("qk_layernorm"):
        if not normalised or not all(sparse):
            raise UnsupportedModelError(
                f"{where} has moe_router_pre_softmax {not normalised} and {sparse.count(False)} dense layers without "
                "qk_layernorm: no family here combines these"
            )
        return {**common, "num_local_experts": experts, "intermediate_size": size}
    return {
        **common,
        "num_experts": experts,
        "moe_intermediate_size": size,
        "norm_topk_prob": normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, is_sparse in enumerate(sparse) if not is_sparse],
    }
