"""The configuration that vLLM builds for drafts by MTP layers, EAGLE heads and a draft model. No weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, LlamaConfig, PretrainedConfig

from megatron_runtime.backends.vllm.arguments import engine_arguments
from megatron_runtime.backends.vllm.service import _register_logits_processor, check
from megatron_runtime.engine.settings import EngineSettings

from .test_model_runner_v2 import RELEASE

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=16)
DRAFT = LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, num_key_value_heads=2, head_dim=16)
DEEPSEEK = DeepseekV3Config(
    **SIZES,
    num_key_value_heads=4,
    num_nextn_predict_layers=1,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
)


def write(directory: Path, config: PretrainedConfig, architecture: str) -> Path:
    directory.mkdir()
    facts = {**config.to_dict(), "architectures": [architecture], "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(facts))
    save_file({"model.norm.weight": torch.zeros(64)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write(tmp_path / "target", LLAMA, "LlamaForCausalLM")


def built(model: Path, speculation: dict[str, Any]) -> Any:
    settings = EngineSettings(
        coordinator="tcp://127.0.0.1:1",
        name="e",
        backend="vllm",
        model=str(model),
        vllm_arguments={"speculative_config": {"num_speculative_tokens": 1, **speculation}},
    )
    check(settings)
    config = _register_logits_processor(engine_arguments(settings, model, cache_events="ipc:///unused"))
    return config.speculative_config


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize(
    ("method", "architecture", "built_architecture"),
    [
        ("eagle", "LlamaForCausalLM", "EagleLlamaForCausalLM"),
        ("eagle3", "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3"),
        ("draft_model", "LlamaForCausalLM", "LlamaForCausalLM"),
    ],
)
def test_vllm_accepts_the_configuration_of_drafts(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    architecture: str,
    built_architecture: str,
    has_triton: bool,
) -> None:
    """A draft model has the rules of `model.source`: a name in vLLM's notation is rejected, a path is resolved."""
    import vllm.config.vllm

    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", has_triton and RELEASE >= (0, 31))
    draft = write(tmp_path / "draft", DRAFT, architecture)
    speculation = built(target, {"method": method, "model": str(draft)})
    assert (speculation.method, speculation.num_speculative_tokens) == (method, 1)
    assert speculation.draft_model_config.model == str(draft)
    assert speculation.draft_model_config.hf_config.architectures == [built_architecture]
    with pytest.raises(ValueError, match=r"speculative_config\.model is \"org/draft\": give hf:ORG/NAME"):
        built(target, {"method": method, "model": "org/draft"})


def test_mtp_uses_the_layers_of_the_model(tmp_path: Path) -> None:
    model = write(tmp_path / "deepseek", DEEPSEEK, "DeepseekV3ForCausalLM")
    speculation = built(model, {"method": "mtp"})
    assert speculation.method == "mtp"
    assert speculation.draft_model_config.model == str(model)
    assert speculation.draft_model_config.hf_config.architectures == ["DeepSeekMTPModel"]


def test_a_model_without_mtp_layers_is_rejected(target: Path) -> None:
    with pytest.raises(ValueError, match=r"with this model: Unsupported speculative method: 'mtp': change or remove"):
        built(target, {"method": "mtp"})
