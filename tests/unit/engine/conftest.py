"""A real small model, tiny random ones, and how to run them through the engine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_thread import one_thread as one_thread  # the fixture
from torch import nn

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

BUILTIN = "builtin:smollm2-135m"
TINY = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "initializer_range": 0.2,
}

Generate = Callable[..., dict[int, list[int]]]


@pytest.fixture(scope="package")
def generate() -> Generate:
    """generate(executor, prompts, new_tokens, config=..., **sampling) -> the new tokens of each prompt.

    `sampling` values may be lists, one value a prompt.
    """

    def run(
        executor: CpuExecutor,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        config: InferenceConfig | None = None,
        seeds: Sequence[int] | None = None,
        **sampling: Any,
    ) -> dict[int, list[int]]:
        engine = EngineCore(executor, config or InferenceConfig())
        for index, prompt in enumerate(prompts):
            own = {name: value[index] if isinstance(value, list) else value for name, value in sampling.items()}
            params = SamplingParams(num_tokens_to_generate=new_tokens, termination_id=IGNORE_EOS, **own)
            seed = seeds[index] if seeds else 0
            engine.add_request(EngineRequest(index, np.array(prompt, np.int32), np.empty(0, np.int32), params, seed))
        answers: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                answers[output.request_id].extend(output.new_tokens)
        engine.check_integrity()
        assert engine.context.usage == 0
        return answers

    return run


@pytest.fixture(scope="package")
def smollm() -> CpuExecutor:
    executor = CpuExecutor(resolve(BUILTIN), dtype="float32", kv_cache_memory=256 << 20)
    executor.load()
    return executor


@pytest.fixture(scope="package")
def smollm_reference(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    from transformers import LlamaForCausalLM

    directory = tmp_path_factory.mktemp("smollm")
    convert(BUILTIN, directory)
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="package")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, nn.Module]]:
    """make_tiny(**config) -> a directory with a random model, and the same model in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(**config: Any) -> tuple[Path, nn.Module]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**TINY, **config})).eval()
        directory = tmp_path_factory.mktemp("tiny")
        model.save_pretrained(directory)
        return directory, model

    return make
