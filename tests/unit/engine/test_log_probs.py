"""Log-probabilities of sampled and prompt tokens are transformers', however prompts are cut, shared and recomputed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

MakeTiny = Callable[..., tuple[Path, nn.Module]]
PROMPTS = [np.random.default_rng(seed).integers(3, 320, length).tolist() for seed, length in enumerate([40, 3, 90, 17])]
TOP = 5
TOLERANCE = 1e-4
CHUNKED = {"max_tokens": 7, "max_requests": 4, "enable_chunked_prefill": True}


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt: list[list[float]] = field(default_factory=list)
    prompt_top: list[list[list[tuple[int, float]]]] = field(default_factory=list)


def run(executor: CpuExecutor, config: InferenceConfig, *, suspends: bool = False, **params: Any) -> list[Answer]:
    """suspends: give memory back and resume, twice in the middle of prompts and once among answers."""
    engine = EngineCore(executor, config)
    answers = [Answer() for _ in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        own = SamplingParams(
            num_tokens_to_generate=12, termination_id=IGNORE_EOS, return_log_probs=True, top_n_logprobs=TOP, **params
        )
        engine.add_request(EngineRequest(index, np.array(prompt, np.int32), np.empty(0, np.int32), own, seed=index))
    for step in count(1):
        if not engine.has_work:
            break
        if suspends and step in (3, 8, 30):
            engine.suspend()
            engine.resume()
        for output in engine.step():
            answer = answers[output.request_id]
            answer.tokens += output.new_tokens
            answer.log_probs += output.new_log_probs or []
            answer.top += output.new_top_n_logprobs or []
            if output.prompt_log_probs is not None:
                answer.prompt.append(output.prompt_log_probs)
                answer.prompt_top.append(output.prompt_top_n_logprobs or [])
    engine.check_integrity()
    return answers


@torch.inference_mode()
def exact(reference: nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    """[n - 1, V]: the distribution of each token but the first."""
    return reference(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def check(found: Sequence[float], top: Sequence[list[tuple[int, float]]], tokens: Sequence[int], lines: Any) -> None:
    assert len(found) == len(top) == len(tokens) == len(lines)
    for value, likeliest, token, line in zip(found, top, tokens, lines, strict=True):
        assert value == pytest.approx(float(line[token]), abs=TOLERANCE)
        values, ids = line.topk(TOP)
        assert [id_ for id_, _ in likeliest] == ids.tolist()
        assert [value for _, value in likeliest] == pytest.approx(values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("config", "suspends"),
    [
        pytest.param({}, False, id="whole prompts"),
        pytest.param(CHUNKED, False, id="chunked"),
        pytest.param({**CHUNKED, "kv_cache_management_mode": "recompute"}, True, id="recomputed"),
        pytest.param({"enable_prefix_caching": True, "block_size_tokens": 16}, False, id="prefix cache"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_they_are_those_of_the_reference(
    make_tiny: MakeTiny, config: dict[str, Any], suspends: bool, temperature: float
) -> None:
    directory, reference = make_tiny()
    executor = CpuExecutor(resolve(str(directory)), dtype="float32", kv_cache_memory=2 << 20, page_size=8)
    executor.load()
    answers = run(
        executor,
        InferenceConfig(**config),
        suspends=suspends,
        temperature=temperature,
        top_p=0.9,
        skip_prompt_log_probs=False,
    )
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        lines = exact(reference, [*prompt, *answer.tokens])
        check(answer.log_probs, answer.top, answer.tokens, lines[len(prompt) - 1 :])
        assert len(answer.prompt) == 1, "the prompt's come once"
        check(answer.prompt[0], answer.prompt_top[0], prompt[1:], lines[: len(prompt) - 1])


def test_processed_log_probs_are_those_of_the_sampled_distribution(make_tiny: MakeTiny) -> None:
    directory, reference = make_tiny()
    executor = CpuExecutor(
        resolve(str(directory)), dtype="float32", kv_cache_memory=1 << 20, logprobs_mode="processed_logprobs"
    )
    executor.load()
    answers = run(executor, InferenceConfig(), temperature=0.5, top_k=3, logit_bias={7: 2.0})
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *answer.tokens]])).logits[0, len(prompt) - 1 : -1]
        logits = logits.clone()
        logits[:, 7] += 2.0
        for value, token, line in zip(answer.log_probs, answer.tokens, logits / 0.5, strict=True):
            kept, ids = line.topk(3)
            assert token in ids.tolist()
            expected = float(kept.log_softmax(-1)[ids.tolist().index(token)])
            assert value == pytest.approx(expected, abs=TOLERANCE)
