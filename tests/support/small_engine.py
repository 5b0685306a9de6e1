"""An engine with a small random model on any device, and functions that collect its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from bench.random_model import LLAMA_8B, RandomCheckpoint
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.torch_executor import TorchExecutor
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.source import ModelInMemory
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.models.config import ModelConfig, MoEConfig, SlidingWindow
from megatron_runtime.requests.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

CPU = torch.device("cpu")
SMALL = replace(
    LLAMA_8B,
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
MIXTURE = replace(
    SMALL,
    family="qwen3_moe",
    qk_norm=True,
    moe=MoEConfig(num_experts=6, experts_per_token=2, intermediate_size=32, normalize=True, dense_layers=(0,)),
)
GEMMA = replace(
    SMALL,
    family="gemma3_text",
    qk_norm=True,
    activation="gelu_tanh",
    norm_weight_offset=1.0,
    output_norms=True,
    embedding_scale=8.0,
    sliding=SlidingWindow(window=20, is_local=(True, False), rope_theta=1000.0),
    tie_embeddings=True,
)
PROMPTS = [list(range(1, 40)), list(range(1, 40)), [7], list(range(60, 90))]


def engine_on(
    make_executor: Callable[..., TorchExecutor], mode: KVCacheManagementMode, model: ModelConfig = SMALL
) -> EngineCore:
    """Return an engine. make_executor: CpuExecutor, or CudaExecutor with its size arguments bound."""
    config = InferenceConfig(
        max_requests=4,
        max_tokens=48,
        max_sequence_length=96,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        block_size_tokens=16,
        kv_cache_management_mode=mode,
    )
    executor = make_executor(
        ModelInMemory(RandomCheckpoint(model, torch.float32, CPU), name="random weights"),
        ModelText(_no_tokenizer),
        dtype="float32",
        kv_cache_memory=1 << 20,
        max_sequence_length=96,
    )
    executor.load()
    return EngineCore(executor, config)


def answers(engine: EngineCore, *, suspend_after: int | None = None) -> dict[int, list[int]]:
    nothing = np.empty(0, dtype=np.int32)
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=0.0 if number % 2 else 0.9,
            top_k=1 if number % 2 else 20,
            num_tokens_to_generate=12,
            termination_id=IGNORE_EOS,
            presence_penalty=0.5 if number == 3 else 0.0,
        )
        engine.add_request(EngineRequest(number, np.array(prompt, dtype=np.int32), nothing, params, seed=number))
    found: dict[int, list[int]] = {number: [] for number in range(len(PROMPTS))}
    steps = 0
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.new_tokens
        steps += 1
        if steps == suspend_after:
            engine.suspend()
            engine.resume()
    engine.check_integrity()
    return found


def _no_tokenizer():
    raise AssertionError("these tests use token ids only")
