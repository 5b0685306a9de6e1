"""The built-in Gemma 3, from its GGUF file with weights of five formats, against transformers on the same values."""

import numpy as np
import pytest
import soak
import torch
from random_checkpoint import all_tensors
from torch import nn

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.models.families import config_to_hf
from megatron_runtime.models.tensors import Checkpoint
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams
from megatron_runtime.tokenization import load_tokenizer

MODEL = "builtin:gemma3-270m"
PROMPTS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "def fibonacci(n):\n    ": [2, 2063, 10779, 78113, 236769, 236749, 1473, 107, 140],
    "Once upon a time, in a small village by the sea,": [
        *[2, 14946, 3324, 496, 990, 236764, 528, 496, 1944, 9744, 684, 506, 5442, 236764],
    ],
    "Water boils at": [2, 17390, 104264, 657],
    "Das Wetter ist heute": [2, 22943, 105236, 3526, 34306],
}
NEW_TOKENS = soak.size(6, soak=24)


def reference_of(checkpoint: Checkpoint) -> nn.Module:
    """Return the model of transformers with the dequantised values."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    with torch.device("meta"):
        model = Gemma3ForCausalLM(Gemma3TextConfig(**config_to_hf(checkpoint.config)))
    held = {name: tensor.clone() for name, tensor in all_tensors(checkpoint).items()}
    model.load_state_dict({**held, "lm_head.weight": held["model.embed_tokens.weight"]}, assign=True)
    # What is computed and not stored has to leave the meta device by hand.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.model.embed_tokens.embed_scale = torch.tensor(model.config.hidden_size**0.5)
    return model.eval()


@torch.inference_mode()
def test_greedy_answers_are_those_of_transformers() -> None:
    source = resolve(MODEL)
    executor = CpuExecutor(source, dtype="float32", kv_cache_memory=64 << 20, threads=1)
    executor.load()
    engine = EngineCore(executor, InferenceConfig(max_sequence_length=256))
    prompts = list(PROMPTS.values())[: soak.size(2, soak=len(PROMPTS))]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, num_tokens_to_generate=NEW_TOKENS, termination_id=IGNORE_EOS)
        engine.add_request(EngineRequest(number, np.array(prompt, np.int32), np.array([], np.int32), params))
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.new_tokens
    reference = reference_of(open_checkpoint(source))
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = reference(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
        assert logits.argmax(dim=-1).tolist() == answer


@pytest.mark.skipif(not soak.SOAK, reason="a vocabulary of 262k pieces takes seconds to compile")
def test_its_vocabulary_is_read_from_the_file() -> None:
    tokenizer = load_tokenizer(MODEL)
    for text, ids in PROMPTS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("  🤗\n\n\t<table>", add_special=False) == [138, 242352, 108, 255968, 168]
    assert set(tokenizer.eos_ids) == {1, 106}
