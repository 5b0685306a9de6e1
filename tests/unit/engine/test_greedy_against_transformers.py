"""Greedy float32 output is that of transformers, token for token, however the engine batches, chunks and preempts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from soak import size
from torch import nn

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.tokenization import load_tokenizer

PROMPTS: list[str] = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three primary colours are",
    "A",
    "In 1969, the first people to walk on the",
    "1, 1, 2, 3, 5, 8, 13,",
    "The mitochondria is the",
    "To make bread, you need flour, water,",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,\n\n",
    "The opposite of hot is cold. The opposite of up is",
    "SELECT name FROM users WHERE",
    "Here is a short poem about the rain:\n",
    "The Pythagorean theorem says that",
    "Q: How many legs does a spider have?\nA:",
    "import numpy as np\n\n",
    "Gravity is a force that " + "pulls everything that has mass towards everything else. " * 8,
    "Translate to Spanish: good morning ->",
][:: size(3, soak=1)]
NEW_TOKENS = size(16, soak=64)

Generate = Callable[..., dict[int, list[int]]]
MakeTiny = Callable[..., tuple[Path, nn.Module]]


@torch.inference_mode()
def assert_greedy(reference: nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """By induction the same as generating: each token is the reference's choice after all tokens before it."""
    logits = reference(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    assert logits.argmax(dim=-1).tolist() == list(answer)


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(3, 320, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer("builtin:smollm2-135m")
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def together(smollm: CpuExecutor, generate: Generate, prompts: list[list[int]]) -> dict[int, list[int]]:
    """What the built-in model answers to all prompts in one batch."""
    return generate(smollm, prompts, NEW_TOKENS, temperature=0.0)


@pytest.mark.parametrize("index", range(0, len(PROMPTS), size(2, soak=1)))
def test_builtin_model_in_a_batch(
    together: dict[int, list[int]], smollm_reference: nn.Module, prompts: list[list[int]], index: int
) -> None:
    assert len(together[index]) == NEW_TOKENS
    assert_greedy(smollm_reference, prompts[index], together[index])


@pytest.mark.parametrize("index", range(0, len(PROMPTS), size(3, soak=1)))
def test_builtin_model_alone(
    smollm: CpuExecutor, generate: Generate, prompts: list[list[int]], together: dict[int, list[int]], index: int
) -> None:
    """The same as in the batch, which is the reference's."""
    assert generate(smollm, [prompts[index]], NEW_TOKENS, temperature=0.0)[0] == together[index]


@pytest.mark.parametrize(
    ("threads", "config"),
    [
        pytest.param(2, {"tie_word_embeddings": True}, id="tied embeddings, two threads"),
        pytest.param(1, {"num_key_value_heads": 6}, id="one key-value head per query head"),
        pytest.param(1, {"num_key_value_heads": 1, "head_dim": 16}, id="one key-value head, wide"),
        pytest.param(
            1,
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500000.0,
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            id="scaled rotary frequencies",
        ),
    ],
)
def test_variants_of_the_architecture(
    make_tiny: MakeTiny, generate: Generate, threads: int, config: dict[str, Any]
) -> None:
    directory, reference = make_tiny(**config)
    executor = CpuExecutor(resolve(str(directory)), dtype="float32", kv_cache_memory=8 << 20, threads=threads)
    executor.load()
    prompts = random_prompts([1, 5, 40, 129])
    answers = generate(executor, prompts, 24, temperature=0.0)
    for index, prompt in enumerate(prompts):
        assert_greedy(reference, prompt, answers[index])


@pytest.mark.parametrize(
    ("pages", "config"),
    [
        pytest.param(400, {"max_tokens": 16, "max_requests": 8}, id="prompts in chunks beside running requests"),
        pytest.param(60, {"max_tokens": 64, "max_requests": 8}, id="preemption and recomputation"),
        pytest.param(400, {"max_tokens": 2048, "max_requests": 32}, id="lengths far apart in one batch"),
    ],
)
def test_schedules(make_tiny: MakeTiny, generate: Generate, pages: int, config: dict[str, int]) -> None:
    directory, reference = make_tiny()
    page_bytes = 8 * 3 * 2 * 2 * 8 * 4
    executor = CpuExecutor(resolve(str(directory)), dtype="float32", kv_cache_memory=pages * page_bytes, page_size=8)
    assert executor.num_pages == pages
    executor.load()
    prompts = random_prompts([1, 3, 8, 9, 17, 33, 70, 100, 2, 300, 301, 24])
    answers = generate(
        executor, prompts, 30, config=InferenceConfig(enable_chunked_prefill=True, **config), temperature=0.0
    )
    for index, prompt in enumerate(prompts):
        assert_greedy(reference, prompt, answers[index])


@torch.inference_mode()
def test_bfloat16_strays_no_further_than_rounding(make_tiny: MakeTiny, generate: Generate) -> None:
    """What it chooses is, in float32, within the rounding errors of transformers in bfloat16 of the best."""
    directory, reference = make_tiny()
    from transformers import LlamaForCausalLM

    rounded = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    executor = CpuExecutor(resolve(str(directory)), dtype="bfloat16", kv_cache_memory=8 << 20)
    executor.load()
    prompts = random_prompts([4, 30, 65])
    answers = generate(executor, prompts, 16, temperature=0.0)
    for index, prompt in enumerate(prompts):
        tokens = torch.tensor([[*prompt, *answers[index][:-1]]])
        exact, near = (model(tokens).logits[0, len(prompt) - 1 :].float() for model in (reference, rounded))
        chosen = exact.gather(1, torch.tensor(answers[index])[:, None])[:, 0]
        assert (exact.max(dim=-1).values - chosen).max() <= 2 * (exact - near).abs().max()
