"""Direct and through a coordinator, blocking and on an event loop: the same tokens and text in float32."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from random_checkpoint import write_speaking_model

from megatron_runtime.megatron_core.apis import MegatronAsyncLLM, MegatronLLM
from megatron_runtime.megatron_core.config import InferenceConfig
from megatron_runtime.megatron_core.inference_request import DynamicInferenceRequest
from megatron_runtime.megatron_core.sampling_params import SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "1, 2, 3, 4,"]
OPTIONS: dict[str, Any] = {
    "inference_config": InferenceConfig(max_sequence_length=128, buffer_size_gb=0.1),
    "dtype": "float32",
    "threads": 1,
}
PARAMS = [
    SamplingParams(temperature=0.0, num_tokens_to_generate=5, return_log_probs=True),
    SamplingParams(temperature=0.9, top_p=0.9, seed=7, num_tokens_to_generate=5, return_log_probs=True),
]


def blocking(model: str, use_coordinator: bool) -> list[list[DynamicInferenceRequest]]:
    with MegatronLLM.from_pretrained(model, use_coordinator=use_coordinator, **OPTIONS) as llm:
        return [llm.generate(PROMPTS, params) for params in PARAMS]


async def on_a_loop(model: str, use_coordinator: bool) -> list[list[DynamicInferenceRequest]]:
    mode = {"use_coordinator": use_coordinator, "allow_direct_mode": not use_coordinator}
    async with MegatronAsyncLLM.from_pretrained(model, **mode, **OPTIONS) as llm:
        return [await llm.generate(PROMPTS, params) for params in PARAMS]


def test_all_modes_give_the_same_tokens_and_log_probs(tmp_path: Path) -> None:
    model = str(write_speaking_model(tmp_path / "model"))
    expected, *others = (
        blocking(model, False),
        blocking(model, True),
        asyncio.run(on_a_loop(model, True)),
        asyncio.run(on_a_loop(model, False)),
    )
    assert len({str(request.generated_tokens) for answers in expected for request in answers}) > 1
    for found in others:
        for mine, theirs in zip(expected, found, strict=True):
            assert [request.generated_tokens for request in theirs] == [request.generated_tokens for request in mine]
            assert [request.generated_text for request in theirs] == [request.generated_text for request in mine]
            for one, other in zip(mine, theirs, strict=True):
                assert other.generated_log_probs == pytest.approx(one.generated_log_probs, abs=1e-4)
