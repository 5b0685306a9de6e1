from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_runtime.apis import MegatronAsyncLLM, MegatronLLM
from megatron_runtime.config import InferenceConfig
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.tokenization import Tokenizer, load_tokenizer


@pytest.fixture(scope="package")
def tokenizer() -> Tokenizer:
    return load_tokenizer("builtin:smollm2-135m")


@pytest.fixture(scope="package")
def tiny_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A Llama of random weights: what it says is nonsense, but always the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def options(tiny_model: LlamaForCausalLM, tokenizer: Tokenizer) -> dict[str, Any]:
    config = InferenceConfig(max_sequence_length=256, buffer_size_gb=0.02)
    return {"model": tiny_model, "tokenizer": tokenizer, "inference_config": config, "dtype": "float32", "threads": 1}


@pytest.fixture
def make(options: dict[str, Any]) -> Iterator[Callable[..., MegatronLLM]]:
    """MegatronLLMs of the tiny model, shut down at the end; no process may be left then."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    made: list[MegatronLLM] = []

    def construct(**more: Any) -> MegatronLLM:
        made.append(MegatronLLM(**{**options, **more}))
        return made[-1]

    yield construct
    for llm in made:
        llm.shutdown()
        llm.engine.check_integrity()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.fixture
def make_async(options: dict[str, Any]) -> Callable[..., MegatronAsyncLLM]:
    return lambda **more: MegatronAsyncLLM(**{**options, **more})


@pytest.fixture
def greedy() -> Callable[..., SamplingParams]:
    return lambda tokens=8, **values: SamplingParams(temperature=0.0, num_tokens_to_generate=tokens, **values)
