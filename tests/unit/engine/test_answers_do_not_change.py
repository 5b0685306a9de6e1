"""A real forward pass in float32: whatever shares, splits, evicts, suspends or updates, the tokens stay the same."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from soak import SOAK
from torch import nn

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.requests.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

MakeTiny = Callable[..., tuple[Path, nn.Module]]

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 1.0, "logit_bias": {7: 3.0, 9: -5.0}},
    {"temperature": 0.0, "return_log_probs": True, "top_n_logprobs": 3},
    {"temperature": 0.9, "bad_words": ["as token sequences below"]},
]
BAD_WORDS = [(token,) for token in range(0, 320, 2)] + [(first, 5) for first in range(1, 320, 4)]


@pytest.fixture(scope="module")
def tiny(make_tiny: MakeTiny) -> tuple[CpuExecutor, str]:
    directory, _ = make_tiny()
    executor = CpuExecutor(resolve(str(directory)), dtype="float32", kv_cache_memory=2 << 20, threads=1)
    executor.load()
    return executor, str(directory)


def mixed_requests(count: int) -> list[EngineRequest]:
    """Requests of every kind, most of which begin alike."""
    random = np.random.default_rng(5)
    stem = random.integers(3, 320, 64)
    requests = []
    for number in range(count):
        prompt = np.concatenate([stem[: random.integers(0, 65)], random.integers(3, 320, random.integers(1, 20))])
        params = SamplingParams(
            num_tokens_to_generate=int(random.integers(4, 16)),
            termination_id=IGNORE_EOS,
            **KINDS[number % len(KINDS)],
        )
        requests.append(
            EngineRequest(
                number,
                prompt.astype(np.int32),
                np.array([], np.int32),
                params,
                seed=number,
                bad_words=BAD_WORDS if params.bad_words else None,
            )
        )
    return requests


def make_engine(executor: CpuExecutor, **config: Any) -> EngineCore:
    defaults = {"max_requests": 32, "max_tokens": 4096, "enable_chunked_prefill": True, "max_sequence_length": 256}
    return EngineCore(executor, InferenceConfig(**{**defaults, **config}))


def run(engine: EngineCore, requests: list[EngineRequest]) -> dict[int, list[int]]:
    answers: dict[int, list[int]] = {request.request_id: request.generated_tokens.tolist() for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.new_tokens
        engine.check_integrity()
    assert engine.context.usage == 0
    return answers


@pytest.fixture(scope="module")
def alone(tiny: tuple[CpuExecutor, str]) -> dict[int, list[int]]:
    """The answer of each request, when nothing else runs."""
    executor, _ = tiny
    answers = {}
    for request in mixed_requests(32):
        answers |= run(make_engine(executor), [request])
    return answers


def test_no_answer_has_its_bad_words(alone: dict[int, list[int]]) -> None:
    answers = [alone[request.request_id] for request in mixed_requests(32) if request.bad_words]
    pairs = [pair for answer in answers for pair in pairwise(answer)]
    assert all(token % 2 for answer in answers for token in answer)
    assert not [pair for pair in pairs if pair in BAD_WORDS]


def test_a_batch_of_32_mixed_requests_equals_each_alone(
    tiny: tuple[CpuExecutor, str], alone: dict[int, list[int]]
) -> None:
    engine = make_engine(
        tiny[0], enable_prefix_caching=True, prefix_caching_eviction_policy="lru", block_size_tokens=16
    )
    assert run(engine, mixed_requests(32)) == alone
    assert engine.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("seed", range(400 if SOAK else 4))
def test_no_disturbance_changes_an_answer(
    tiny: tuple[CpuExecutor, str], alone: dict[int, list[int]], seed: int
) -> None:
    random = Random(seed)
    executor, directory = tiny
    engine = make_engine(
        executor,
        max_requests=random.randint(2, 12),
        max_tokens=random.randint(12, 200),
        enable_prefix_caching=random.random() < 0.8,
        prefix_caching_eviction_policy=random.choice(["lru", "ref_zero"]),
        block_size_tokens=random.choice([16, 32]),
        kv_cache_management_mode=random.choice(list(KVCacheManagementMode)),
    )
    answers: dict[int, list[int]] = {}
    aborted: set[int] = set()
    waiting = mixed_requests(32)[: random.randint(4, 12)]
    while waiting or engine.has_work:
        event = random.choice(["step"] * 14 + ["add"] * 5 + ["suspend", "update", "abort"])
        if event == "add" and waiting:
            request = waiting.pop()
            # As after a failover: what another engine generated comes with it.
            given_before = alone[request.request_id][: random.randint(0, 3)]
            engine.add_request(replace(request, generated_tokens=np.array(given_before, np.int32)))
            answers[request.request_id] = given_before
        elif event == "suspend":
            engine.suspend()
            engine.resume()
        elif event == "update":
            executor.stage_weights(directory)
            engine.swap_weights(engine.epoch + 1)
        elif event == "abort" and answers:
            victim = random.choice(sorted(answers))
            if engine.abort_request(victim):
                aborted.add(victim)
        else:
            for output in engine.step():
                answers[output.request_id] += output.new_tokens
        engine.check_integrity()
    assert engine.context.usage == 0
    for number in set(answers) - aborted:
        assert answers[number] == alone[number]
