"""Headers of small checkpoints of many architectures, as transformers saves them: configuration, names, shapes, types.

`python tests/support/checkpoint_headers.py` writes tests/support/checkpoint_headers.jsonl again with the installed
transformers. The file has no weights. An architecture whose small model transformers cannot build is left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".jsonl")

ARCHITECTURES = [
    "apertus",
    "arcee",
    "bamba",
    "bitnet",
    "bloom",
    "codegen",
    "cohere",
    "cohere2",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "falcon",
    "falcon_h1",
    "falcon_mamba",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jamba",
    "lfm2",
    "llama",
    "llama4_text",
    "llava",
    "mamba",
    "mamba2",
    "minimax",
    "ministral",
    "mistral",
    "mistral3",
    "mixtral",
    "mllama_text",
    "mpt",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_moe",
    "qwen2_vl",
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "recurrent_gemma",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "zamba2",
]
_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small(config: Any) -> Any:
    """Shrink a configuration and those in it, in place."""
    for name, size in _SIZES.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, size)
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, getattr(config, name)[:2])
    for part in ("text_config", "vision_config"):
        if hasattr(config, part):
            small(getattr(config, part))
    return config


def header_of(model_type: str) -> dict[str, Any]:
    """Save a small random model of a type; return its configuration and the shapes and types of its tensors."""
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = small(AutoConfig.for_model(model_type))
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            model = auto.from_config(config)
            break
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        tensors = {}
        with safe_open(f"{directory}/model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                tensors[name] = [part.get_dtype(), part.get_shape()]
        values = json.loads(Path(directory, "config.json").read_text())
    return {"model_type": model_type, "config": values, "tensors": tensors}


def headers() -> list[dict[str, Any]]:
    """Return the recorded headers."""
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def main() -> None:
    lines = []
    for model_type in ARCHITECTURES:
        try:
            lines.append(json.dumps(header_of(model_type), sort_keys=True))
        except Exception as error:
            print(f"{model_type}: left out: {type(error).__name__}: {error}"[:200], file=sys.stderr)
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
