"""Write any model this runtime reads as a directory that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from megatron_runtime.loading.checkpoint import open_checkpoint
from megatron_runtime.loading.source import ModelSource, resolve
from megatron_runtime.models.llama_config import LlamaConfig


def export_hf(source: ModelSource | str, directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (float32 where it was quantised).

    source:    a model reference or what `resolve` made of one.
    directory: made if needed; files of these names are replaced.
    """
    checkpoint = open_checkpoint(resolve(source) if isinstance(source, str) else source)
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.tensors()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = checkpoint.config
    (directory / "config.json").write_text(json.dumps(_config_json(config, dtype), indent=2) + "\n")
    generation = {"eos_token_id": list(config.eos_token_ids), "bos_token_id": config.bos_token_id}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _config_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    scaling = None
    if config.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_position_embeddings,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
        "dtype": dtype,
    }
