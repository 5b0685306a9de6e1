from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from own_children import own_children
from random_checkpoint import LLAMA, random_model, random_tensors, write_model
from scripted_pool import collect as collect
from scripted_pool import elsewhere as elsewhere
from scripted_pool import params as params
from scripted_pool import pool as pool

from megatron_runtime.checkpoints.in_memory import TensorsInMemory
from megatron_runtime.megatron_core.apis import MegatronAsyncLLM, MegatronLLM
from megatron_runtime.megatron_core.config import InferenceConfig
from megatron_runtime.megatron_core.sampling_params import SamplingParams
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.tokenization import Tokenizer, load_tokenizer


@pytest.fixture(scope="package")
def tokenizer() -> Tokenizer:
    return load_tokenizer("builtin:smollm2-135m")


@pytest.fixture(scope="package")
def tiny_config(tokenizer: Tokenizer) -> ModelConfig:
    """Of a Llama of random weights: what it says is nonsense, but always the same."""
    return replace(
        LLAMA,
        vocab_size=tokenizer.vocab_size,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=512,
        eos_token_ids=(),
    )


@pytest.fixture(scope="package")
def tiny_model(tiny_config: ModelConfig) -> TensorsInMemory:
    return random_model(tiny_config)


@pytest.fixture(scope="package")
def tiny_directory(tiny_config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a directory."""
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_config, random_tensors(tiny_config))


@pytest.fixture
def options(tiny_model: TensorsInMemory, tokenizer: Tokenizer) -> dict[str, Any]:
    config = InferenceConfig(max_sequence_length=256, buffer_size_gb=0.02)
    return {"model": tiny_model, "tokenizer": tokenizer, "inference_config": config, "dtype": "float32", "threads": 1}


@pytest.fixture
def make(options: dict[str, Any]) -> Iterator[Callable[..., MegatronLLM]]:
    """MegatronLLMs of the tiny model, shut down at the end; no process may be left then."""
    before = own_children(recursive=True)
    made: list[MegatronLLM] = []

    def construct(**more: Any) -> MegatronLLM:
        made.append(MegatronLLM(**{**options, **more}))
        return made[-1]

    yield construct
    for llm in made:
        llm.shutdown()
        llm.engine.core.check_integrity()
    assert own_children(recursive=True) <= before


@pytest.fixture
def make_async(options: dict[str, Any]) -> Callable[..., MegatronAsyncLLM]:
    return lambda **more: MegatronAsyncLLM(**{**options, **more})


@pytest.fixture
def greedy() -> Callable[..., SamplingParams]:
    return lambda tokens=8, **values: SamplingParams(temperature=0.0, num_tokens_to_generate=tokens, **values)
