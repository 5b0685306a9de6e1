"""A transformers model in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.megatron_core.apis import MegatronLLM
from megatron_runtime.megatron_core.config import InferenceConfig
from megatron_runtime.megatron_core.sampling_params import SamplingParams
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.tokenization import Tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CONFIG = InferenceConfig(max_sequence_length=128, buffer_size_gb=0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    """The built-in model."""
    from transformers import LlamaForCausalLM

    directory = tmp_path_factory.mktemp("smollm")
    convert("builtin:smollm2-135m", directory)
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def test_answers_equal_those_of_transformers(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._backend, eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=5)
    with MegatronLLM(model=model, tokenizer=theirs, inference_config=CONFIG, dtype="float32", threads=1) as llm:
        request = llm.generate("The capital of France is", params)
    with torch.inference_mode():
        ids = torch.tensor([list(request.prompt_tokens)])
        reference = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :].tolist()
    assert request.generated_tokens == reference


def test_a_model_in_training_mode_is_rejected(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    model.train()
    try:
        with pytest.raises(UnsupportedModelError, match=r"model\.eval"):
            MegatronLLM(model=model, tokenizer=tokenizer, inference_config=CONFIG)
    finally:
        model.eval()
