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

from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.megatron_core.sampling_params import SamplingParams

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


def test_an_engine_takes_model_tokenizer_and_limits_of_the_objects_of_the_release() -> None:
    tokens, expected, text, limits, max_requests, buffer_size_gb = in_processes(1, _generate)
    assert tokens == expected
    assert text == "".join(f" {token}" for token in tokens)
    assert limits == (max_requests, 512, 64)
    assert buffer_size_gb == pytest.approx(BUFFER_SIZE_GB, rel=0.01)
