"""Every family against transformers in float32: greedy tokens and log-probabilities of prompts and answers, through the
engine: prompts whole and in chunks, many sequences in a step, pages scattered by completed requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

VOCAB = 160
NEW_TOKENS = 32
LENGTHS = [1, 7, 40, 75]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
GEMMA = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 11}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": {},
    "llama, rope of version 3, tied": {"rope_parameters": SCALED, "tie_word_embeddings": True},
    "llama, linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    "mistral, short window": {"sliding_window": 5},
    "qwen2": {},
    "qwen2, windows from the second layer on": {
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen3": {},
    "gemma3_text, window shorter than prompts": {"sliding_window": 6, **GEMMA},
    "gemma3_text, window of pages": {"sliding_window": 33, **GEMMA},
    "gemma3_text, window longer than all": {"sliding_window": 200, **GEMMA},
    "mixtral": EXPERTS,
    "mixtral, window": {**EXPERTS, "sliding_window": 30},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "qwen3_moe, dense layers, shares as they are": {
        **EXPERTS,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
}


@dataclass
class Answer:
    tokens: list[int]
    log_probs: list[float]
    prompt_log_probs: list[float]


def make(case: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    # Nothing of a model is trivial: norms, biases and routers are as random as the rest.
    config = AutoConfig.for_model(case.split(",")[0], **{**SIZES, **CASES[case]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("bias", "mlp.gate.weight")):
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def executor_of(source: Any) -> CpuExecutor:
    executor = CpuExecutor(source, dtype="float32", kv_cache_memory=8 << 20, threads=1)
    executor.load()
    return executor


def answer(executor: CpuExecutor, prompts: Sequence[list[int]], *, max_tokens: int = 512) -> list[Answer]:
    config = InferenceConfig(
        max_sequence_length=256, max_tokens=max_tokens, max_requests=8, enable_chunked_prefill=True
    )
    engine = DynamicInferenceEngine(executor, config)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0,
            num_tokens_to_generate=NEW_TOKENS,
            termination_id=IGNORE_EOS,
            return_log_probs=True,
            skip_prompt_log_probs=False,
        )
        engine.add_request(EngineRequest(number, np.array(prompt, np.int32), np.array([], np.int32), params))
    answers = [Answer([], [], []) for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            mine = answers[output.request_id]
            mine.tokens += output.new_tokens
            mine.log_probs += output.new_log_probs or []
            mine.prompt_log_probs += output.prompt_log_probs or []
    engine.check_integrity()
    return answers


@torch.inference_mode()
def assert_same(reference: torch.nn.Module, prompt: list[int], ours: Answer) -> None:
    """Each token is the reference's choice after all before it, and every log-probability is the reference's."""
    assert len(ours.tokens) == NEW_TOKENS
    tokens = torch.tensor([[*prompt, *ours.tokens]])
    log_probs = reference(tokens, use_cache=False).logits[0, :-1].log_softmax(dim=-1)
    assert log_probs[len(prompt) - 1 :].argmax(dim=-1).tolist() == ours.tokens
    expected = log_probs.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    assert ours.prompt_log_probs + ours.log_probs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_log_probs_equal_transformers(case: str) -> None:
    reference = make(case)
    executor = executor_of(model_in_memory(reference))
    random = np.random.default_rng(1)
    prompts = [random.integers(3, VOCAB, length).tolist() for length in LENGTHS]
    whole, in_chunks = answer(executor, prompts), answer(executor, prompts, max_tokens=19)
    for prompt, ours, again in zip(prompts, whole, in_chunks, strict=True):
        assert_same(reference, prompt, ours)
        assert again.tokens == ours.tokens
        assert again.prompt_log_probs == pytest.approx(ours.prompt_log_probs, abs=1e-4)
        assert again.log_probs == pytest.approx(ours.log_probs, abs=1e-4)
