"""`routing_indices` of an answer, from a model of experts: only with moe_enable_routing_replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_checkpoint import CONFIGS, random_model

from megatron_runtime.checkpoints.in_memory import TensorsInMemory
from megatron_runtime.megatron_core.apis import MegatronLLM
from megatron_runtime.megatron_core.config import InferenceConfig
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.megatron_core.inference_request import DynamicInferenceRequest
from megatron_runtime.tokenization import Tokenizer

LAYERS, PER_TOKEN = 2, 2


@pytest.fixture(scope="module")
def mixture(tokenizer: Tokenizer) -> TensorsInMemory:
    """Three layers, of which one has no experts."""
    config = CONFIGS["qwen3_moe, a dense layer"]
    return random_model(replace(config, vocab_size=tokenizer.vocab_size, eos_token_ids=()))


@pytest.fixture
def recording(make: Callable[..., MegatronLLM], mixture: TensorsInMemory) -> Callable[..., MegatronLLM]:
    config = InferenceConfig(max_sequence_length=128, buffer_size_gb=0.02, moe_enable_routing_replay=True)
    return lambda **more: make(model=mixture, inference_config=config, **more)


def test_an_answer_has_the_experts_of_each_token_but_the_last(recording, greedy) -> None:
    answers = [
        recording(use_coordinator=use_coordinator).generate([5, 9, 31], greedy(6)) for use_coordinator in (False, True)
    ]
    direct = answers[0].routing_indices
    assert direct.shape == (3 + 6 - 1, LAYERS, PER_TOKEN)
    assert direct.dtype == torch.int64
    assert (direct[..., 0] != direct[..., 1]).all()
    assert torch.equal(answers[1].routing_indices, direct)
    copy = DynamicInferenceRequest.deserialize(answers[0].serialize())
    assert torch.equal(copy.routing_indices, direct)


def test_a_stop_text_ends_the_experts_with_the_answer(recording, greedy) -> None:
    llm = recording()
    whole = llm.generate([5, 9, 31], greedy(12))
    stop = whole.generated_text[len(whole.generated_text) // 2 :][:3]
    ended = llm.generate([5, 9, 31], greedy(12, stop_words=[stop]))
    assert ended.finish_reason == "stop"
    rows = 3 + len(ended.generated_tokens) - 1
    assert rows < len(whole.routing_indices)
    assert torch.equal(ended.routing_indices, whole.routing_indices[:rows])


def test_without_the_option_there_are_none(make, mixture, greedy) -> None:
    assert make(model=mixture).generate([5, 9, 31], greedy(2)).routing_indices is None


async def test_a_client_gets_an_array(recording, greedy) -> None:
    llm = recording(use_coordinator=True)
    client = InferenceClient(llm._coord_runtime.coord_addr)
    await client.start()
    try:
        record: Any = await client.add_request([5, 9, 31], greedy(6))
    finally:
        client.stop()
    assert record[0].routing_indices.shape == (8, LAYERS, PER_TOKEN)
    assert record.merge().routing_indices.tolist() == llm.generate([5, 9, 31], greedy(6)).routing_indices.tolist()
