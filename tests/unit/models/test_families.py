"""Every family against transformers in float32, in torch operators and in the C++ kernels.

Greedy tokens and log-probabilities of prompts and answers, through the engine: prompts whole and in chunks, many
sequences in a step, pages scattered by completed requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from random_checkpoint import CONFIGS
from torch import nn

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.models.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    SlidingWindow,
    YarnScaling,
)
from megatron_runtime.models.cpp_decoder import CppDecoder
from megatron_runtime.models.decoder import DecoderModel
from megatron_runtime.models.families import config_to_hf
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

VOCAB = 150
NEW_TOKENS = 32
LENGTHS = [1, 7, 40, 75]
SCALED = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = YarnScaling(factor=8.0, original_max_position_embeddings=32, attention_factor=1.3)
LONG_ROPE = LongRopeScaling(
    short_factor=(1.0, 1.1, 1.3, 1.6, 1.9, 2.1, 2.6, 3.0),
    long_factor=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 8.0, 8.0),
    original_max_position_embeddings=64,
    attention_factor=1.2,
)
"""For a head of 16; sized() leaves as many factors as a head has pairs."""
GEMMA = replace(CONFIGS["gemma3_text"], query_scale=11**-0.5)
OLMO3 = CONFIGS["olmo3"]
CASES = {
    **CONFIGS,
    "llama, rope of version 3": replace(CONFIGS["llama"], rope_theta=500.0, rope_scaling=SCALED),
    "llama, linear rope": replace(CONFIGS["llama"], rope_theta=500.0, rope_scaling=LinearScaling(factor=2.0)),
    "llama, yarn": replace(CONFIGS["llama"], rope_theta=500.0, rope_scaling=YARN),
    "phi3, long rope": replace(CONFIGS["phi3"], rope_scaling=LONG_ROPE),
    "qwen2, windows from the second layer on": replace(
        CONFIGS["qwen2"], sliding=SlidingWindow(window=20, is_local=(False, True, True))
    ),
    "gemma3_text, window of pages": replace(GEMMA, sliding=replace(GEMMA.sliding, window=33)),
    "gemma3_text, window longer than all": replace(GEMMA, sliding=replace(GEMMA.sliding, window=200)),
    "olmo3, yarn, another base of local layers": replace(
        OLMO3, rope_scaling=YARN, rope_theta=500.0, sliding=replace(OLMO3.sliding, window=20, rope_theta=2000.0)
    ),
    "mixtral, window": replace(CONFIGS["mixtral"], sliding=SlidingWindow(window=30, is_local=(True, True, True))),
}
DECODERS: dict[type[DecoderModel], dict[str, Any]] = {
    DecoderModel: {"hidden_size": 48},  # no matrix of this size can be packed for the C++ kernels
    CppDecoder: {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16, "vocab_size": 160},
}
"""Decoders on the CPU, and sizes of models that they run."""


def sized(config: ModelConfig, decoder: type[DecoderModel]) -> ModelConfig:
    """Return the example with sizes for a decoder."""
    config = replace(config, **DECODERS[decoder])
    if isinstance(config.rope_scaling, LongRopeScaling):
        pairs, scaling = config.head_dim // 2, config.rope_scaling
        factors = {"short_factor": scaling.short_factor[:pairs], "long_factor": scaling.long_factor[:pairs]}
        config = replace(config, rope_scaling=replace(scaling, **factors))
    if config.moe is not None:
        config = replace(config, moe=replace(config.moe, intermediate_size=config.intermediate_size))
    return config


@dataclass
class Answer:
    tokens: list[int]
    log_probs: list[float]
    prompt_log_probs: list[float]


def make(config: ModelConfig) -> nn.Module:
    """Return the model in transformers. Nothing is trivial: norms, biases and routers are as random as the rest."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_to_hf(config)), dtype=torch.float32).eval()
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
    engine = EngineCore(executor, config)
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


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_log_probs_equal_transformers(case: str, decoder: type[DecoderModel]) -> None:
    reference = make(sized(CASES[case], decoder))
    executor = executor_of(model_in_memory(reference))
    assert type(executor.model) is decoder
    random = np.random.default_rng(1)
    prompts = [random.integers(3, VOCAB, length).tolist() for length in LENGTHS]
    whole, in_chunks = answer(executor, prompts), answer(executor, prompts, max_tokens=19)
    for prompt, ours, again in zip(prompts, whole, in_chunks, strict=True):
        assert_same(reference, prompt, ours)
        assert again.tokens == ours.tokens
        assert again.prompt_log_probs == pytest.approx(ours.prompt_log_probs, abs=1e-4)
        assert again.log_probs == pytest.approx(ours.log_probs, abs=1e-4)
