"""Small models with random weights, in a directory in the format of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.convert import write_text_files
from megatron_runtime.checkpoints.in_memory import TensorsInMemory
from megatron_runtime.checkpoints.safetensors import write_safetensors
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.models.config import Llama3Scaling, ModelConfig, MoEConfig, SlidingWindow
from megatron_runtime.models.families import FAMILIES, config_to_hf
from megatron_runtime.models.tensors import Checkpoint, TensorKind, tensor_shapes
from megatron_runtime.tokenization.loader import write_gguf_tokenizer

LLAMA = ModelConfig(
    family="llama",
    vocab_size=150,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=256,
    tie_embeddings=False,
    eos_token_ids=(2,),
    bos_token_id=1,
)
_EXPERTS = MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=20, normalize=True)
_OLMO = replace(LLAMA, qk_norm=True, joint_qk_norm=True, input_norms=False, output_norms=True)
_SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
CONFIGS = {
    "llama": LLAMA,
    "llama, tied, scaled": replace(LLAMA, tie_embeddings=True, rope_scaling=_SCALING),
    "llama, as many keys as queries": replace(LLAMA, num_kv_heads=6),
    "mistral": replace(LLAMA, family="mistral", sliding=SlidingWindow(window=5, is_local=(True, True, True))),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True),
    "mixtral": replace(LLAMA, family="mixtral", moe=replace(_EXPERTS, intermediate_size=48)),
    "qwen3_moe": replace(LLAMA, family="qwen3_moe", qk_norm=True, moe=_EXPERTS),
    "qwen3_moe, a dense layer": replace(
        LLAMA, family="qwen3_moe", qk_norm=True, moe=replace(_EXPERTS, normalize=False, dense_layers=(1,))
    ),
    "gemma3_text": replace(
        LLAMA,
        family="gemma3_text",
        num_layers=7,
        rope_theta=1_000_000.0,
        tie_embeddings=True,
        activation="gelu_tanh",
        qk_norm=True,
        norm_weight_offset=1.0,
        output_norms=True,
        embedding_scale=LLAMA.hidden_size**0.5,
        query_scale=LLAMA.head_dim**-0.5,
        sliding=SlidingWindow(window=5, is_local=(True, True, True, True, True, False, True), rope_theta=10_000.0),
    ),
    "phi3": replace(LLAMA, family="phi3", fused=True),
    "phi3, window": replace(
        LLAMA, family="phi3", fused=True, sliding=SlidingWindow(window=5, is_local=(True, True, True))
    ),
    "granite": replace(LLAMA, family="granite", embedding_scale=12.0, query_scale=0.25, logit_scale=1 / 8),
    "smollm3": replace(
        LLAMA,
        family="smollm3",
        num_layers=4,
        sliding=SlidingWindow(window=256, is_local=(False, False, False, True), rotates=False),
    ),
    "olmo2": replace(_OLMO, family="olmo2"),
    "olmo3": replace(
        _OLMO, family="olmo3", sliding=SlidingWindow(window=5, is_local=(True, False, True), rope_theta=10_000.0)
    ),
}
"""Examples of every family: those of its tests against transformers, in GGUF files, of shards, of the kernels for GPUs
and of the fuzzer. The first example of a family has its name.
"""
assert {config.family for config in CONFIGS.values()} == set(FAMILIES), "every family has an example"
FAMILY_EXAMPLES = {family: CONFIGS[family] for family in FAMILIES}
TORCH_DIST_CONFIGS = {
    name: config
    for name, config in CONFIGS.items()
    if config.family in ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
}
"""Those that Megatron-LM supports."""
GGUF_PAIRED_ROWS = frozenset(("llama", "mixtral", "granite", "smollm3"))
"""Families for which llama.cpp's converter makes the two rows of q and k adjacent that rotate together."""
GGUF_METADATA: dict[str, dict[str, Any]] = {
    "gemma3_text": {"add_sliding_window": 5},
    "granite": {
        "add_embedding_scale": 12.0,
        "add_residual_scale": 1.0,
        "add_attention_scale": 0.25,
        "add_logit_scale": 8.0,
    },
    "olmo3": {"add_sliding_window": 5, "add_sliding_window_pattern": (True, False, True)},
}
"""What the converter adds to the metadata of a family's example: methods of GGUFWriter and their arguments."""


def random_tensors(
    config: ModelConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return every tensor of the model, by its name in transformers."""
    generator = torch.Generator().manual_seed(seed)
    family = FAMILIES[config.family]
    return {
        family.hf_name(name): torch.randn(shape, generator=generator).mul_(0.2).to(dtype)
        for name, shape in tensor_shapes(config).items()
    }


def all_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Read every tensor of a checkpoint, by its name in transformers."""
    return {name: checkpoint.read(name) for name in checkpoint.kinds}


def random_model(config: ModelConfig, *, seed: int = 0) -> TensorsInMemory:
    """Return a model in memory, as a program may pass it."""
    return TensorsInMemory(config, random_tensors(config, seed=seed))


def write_model(directory: Path, config: ModelConfig, tensors: dict[str, torch.Tensor]) -> Path:
    """Write config.json and model.safetensors; return `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    kinds = {name: TensorKind(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_safetensors(kinds, directory, read=tensors.__getitem__, written=lambda count: None)
    (directory / "config.json").write_text(json.dumps(config_to_hf(config)))
    return directory


OVERFLOW = 7
"""The token for which a model of write_overflowing_model() computes numbers that are not finite."""


def write_overflowing_model(directory: Path) -> Path:
    """Write a mixture of experts in which one expert has huge, finite weights. Only the token OVERFLOW selects it.

    No layer writes two features of the hidden state: the first is 0 except for OVERFLOW, the second is 1. All sizes are
    multiples of the blocks of integer weights, of the panels of the kernels, and of the keys of a page.
    """
    moe = replace(_EXPERTS, intermediate_size=64)
    config = replace(
        LLAMA, family="mixtral", vocab_size=160, hidden_size=64, num_heads=4, head_dim=16, num_layers=3, moe=moe
    )
    tensors = random_tensors(config, seed=4)
    embeddings = tensors["model.embed_tokens.weight"]
    embeddings[:, 0], embeddings[:, 1], embeddings[OVERFLOW, 0] = 0.0, 1.0, 8.0
    for name, tensor in tensors.items():
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensor.fill_(1.0)
        elif name.endswith(("o_proj.weight", "w2.weight")):
            tensor[:2] = 0.0
        elif name.endswith("gate.weight"):
            tensor[3] = 0.0
            tensor[3, 0], tensor[3, 1] = 100.0, -100.0
        elif ".experts.3." in name:
            tensor.mul_(1e38)
    return write_model(directory, config, tensors)


def write_speaking_model(directory: Path, *, head_dim: int = 16) -> Path:
    """Write a model of four heads with the built-in model's vocabulary and tokenizer."""
    sizes = {"vocab_size": 49152, "hidden_size": 4 * head_dim, "intermediate_size": 128, "num_layers": 4}
    config = replace(LLAMA, **sizes, head_dim=head_dim, num_heads=4, num_kv_heads=2, max_position_embeddings=2048)
    model = write_model(directory, config, random_tensors(config, seed=1))
    builtin = resolve("builtin:smollm2-135m")
    write_text_files(open_checkpoint(builtin).config, builtin, model, write_gguf_tokenizer=write_gguf_tokenizer)
    return model


def assert_equal_weights(one: object, other: object) -> None:
    """Compare all tensors of two trees of frozen dataclasses."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert torch.equal(one, other)
    elif isinstance(one, list | tuple):
        assert isinstance(other, list | tuple)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal_weights(mine, theirs)
    elif hasattr(one, "dense"):
        assert_equal_weights(one.dense(), other.dense())  # type: ignore[attr-defined]
    elif hasattr(one, "__dataclass_fields__"):
        for name in one.__dataclass_fields__:
            assert_equal_weights(getattr(one, name), getattr(other, name))
    else:
        assert type(one) is type(other)
