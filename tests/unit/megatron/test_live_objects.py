"""An engine of Megatron-Core's own model, wrapper, controller and context."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpt_models import VOCAB, logits_of, make_gpt
from gpt_program import Send, begin_single_rank, in_processes
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

from megatron_runtime.megatron_core.contexts import dynamic_context as ours
from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.megatron_core.model_inference_wrappers.gpt import gpt_inference_wrapper as ours_wrapper
from megatron_runtime.megatron_core.sampling_params import SamplingParams
from megatron_runtime.megatron_core.text_generation_controllers import text_generation_controller as ours_controller

BUFFER_SIZE_GB = 0.01


class NumberTokenizer:
    """Texts are numbers."""

    vocab_size = VOCAB
    eod = VOCAB - 1
    bos = None

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@torch.no_grad()
def _generate(rank: int, port: int, send: Send) -> None:
    begin_single_rank(port)
    # They allocate tensors on a GPU.
    TextGenerationController._init_dynamic_sampling_tensors = lambda _self: None
    DynamicInferenceContext.initialize_all_tensors = lambda _self: None
    model = make_gpt("llama")
    limits = InferenceConfig(
        max_sequence_length=64, buffer_size_gb=BUFFER_SIZE_GB, max_tokens=512, max_requests=8, block_size_tokens=16
    )
    context = DynamicInferenceContext(model.config, limits)
    controller = TextGenerationController(GPTInferenceWrapper(model, context), NumberTokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = DynamicInferenceEngine(controller, context)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=4, termination_id=-1)
    (answer,) = engine.generate(["5 9 200"], params)
    tokens = answer.generated_tokens
    expected = logits_of(model, [5, 9, 200, *tokens])[2:-1].argmax(-1).tolist()
    config = engine.core.config
    found = (config.max_requests, config.max_tokens, engine.context.max_sequence_length)
    send((tokens, expected, answer.generated_text, found, context.max_requests, config.buffer_size_gb))


@torch.no_grad()
def _run_the_pipeline_of_this_project(rank: int, port: int, send: Send) -> None:
    """The steps of an offline program: setup line, check of the prompts, two trials, counters."""
    begin_single_rank(port)
    model = make_gpt("llama")
    limits = InferenceConfig(
        max_sequence_length=64, buffer_size_gb=BUFFER_SIZE_GB, max_tokens=512, max_requests=8, block_size_tokens=16
    )
    context = ours.DynamicInferenceContext(model.config, limits)
    assert (context.max_tokens, context.max_requests, context.max_sequence_length, context.step_count) == (
        512,
        8,
        64,
        0,
    )
    wrapped = ours_wrapper.GPTInferenceWrapper(model, context)
    tokenizer = NumberTokenizer()
    controller = ours_controller.TextGenerationController(inference_wrapped_model=wrapped, tokenizer=tokenizer)
    engine = DynamicInferenceEngine(controller, context)
    allocator = context.kv_block_allocator
    setup = f"{context.max_requests} | {context.max_tokens} | {allocator.active_count} | {engine.unified_memory_level}"
    assert engine.context is context
    assert engine.controller.tokenizer is tokenizer
    assert engine.state.name == "RUNNING"
    assert engine.capture_stats is None
    assert allocator.total_count == allocator.active_count + 1
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=4, termination_id=-1)
    prompts = [[5, 9, 200], [7, 3]]
    assert all(len(prompt) <= context.max_tokens for prompt in prompts)
    trials = []
    for _ in range(2):
        engine.reset()
        answers = engine.generate(prompts, params)
        counters = context.step_count, context.lifetime_prefill_token_count
        overlapped = context.async_sched_step_count, context.async_sched_compaction_step_count
        trials.append(([answer.generated_tokens for answer in answers], counters, overlapped))
        assert allocator.get_active_used() == 0
        assert allocator.total_avail == allocator.active_count - allocator.get_total_used()
    expected = [
        logits_of(model, [*prompt, *tokens])[len(prompt) - 1 : -1].argmax(-1).tolist()
        for prompt, tokens in zip(prompts, trials[0][0], strict=True)
    ]
    send((setup, trials, expected))


def test_the_low_level_pipeline_runs_an_offline_program() -> None:
    setup, trials, expected = in_processes(1, _run_the_pipeline_of_this_project)
    assert trials[0] == trials[1], "a reset begins again, with the counters, too"
    tokens, (steps, prefilled), overlapped = trials[0]
    assert tokens == expected
    assert prefilled == 5
    assert 4 <= steps <= 6
    assert overlapped == (0, 0), "this engine plans no step while another runs"
    assert setup.startswith("8 | 512 | ")


def test_an_engine_takes_model_tokenizer_and_limits_of_the_objects_of_the_release() -> None:
    tokens, expected, text, limits, max_requests, buffer_size_gb = in_processes(1, _generate)
    assert tokens == expected
    assert text == "".join(f" {token}" for token in tokens)
    assert limits == (max_requests, 512, 64)
    assert buffer_size_gb == pytest.approx(BUFFER_SIZE_GB, rel=0.01)
